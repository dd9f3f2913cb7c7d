"""Control groups: the exact limits, where the host lets us have them.

Version 1 has one tree per controller, version 2 one for all; an ordinary user often has neither.
Groups are named after the process that owns them, so that the next start can remove what a killed
owner left (`sweep`). They hold no process by then: every box dies with its keeper.
"""

import contextlib
import os
import re
import time
from pathlib import Path
from typing import NamedTuple

from burnish.sandbox.cgroup_files import BoxGroup, ControlFiles, make_directory, remove_directories
from burnish.sandbox.cgroup_v1 import GroupV1
from burnish.sandbox.cgroup_v2 import GroupV2
from burnish.sandbox.proctree import start_ticks

# Without these two no limit is exact, so that a tree with neither is of no use.
_CORE = ("memory", "pids")
_SWEEP_TRIES, _SWEEP_PAUSE_S = 100, 0.01


class Controllers(NamedTuple):
    """Where groups can be made, and with what power."""

    version: int
    """1 or 2."""
    bases: dict[str, Path]
    """Controller -> directory of this owner. Version 2 has the same one for all."""
    late: tuple[str, ...] = ()
    """Those of version 1 that a box joins only when a limit of theirs is asked for."""

    @property
    def memory(self) -> bool:
        """Whether memory is limited exactly."""
        return "memory" in self.bases

    @property
    def pids(self) -> bool:
        """Whether processes are counted exactly."""
        return "pids" in self.bases

    def make(self, box: str, *, keep_open: bool = False) -> BoxGroup:
        """Groups for one box; `keep_open` trades descriptors for speed."""
        made = {name: base / box for name, base in self.bases.items()}
        if self.version == 2:
            directory = made["memory"]
            make_directory(directory)
            return GroupV2(directory, made, keep_open=keep_open)
        late = {name: made.pop(name) for name in self.late if name in made}
        for directory in made.values():
            make_directory(directory)
        return GroupV1(made, late, keep_open=keep_open)

    def close(self) -> None:
        """Remove this owner's own directories, which must be empty."""
        remove_directories(set(self.bases.values()))


def find_controllers(
    cgroup_text: str,
    mountinfo_text: str,
    owner: str,
    *,
    sweep_first: bool = True,
    rates: bool = False,
) -> Controllers | None:
    """Make this owner's base directories in the best hierarchy that lets us.

    Args:
        cgroup_text: `/proc/self/cgroup`.
        mountinfo_text: `/proc/self/mountinfo`.
        owner: name from `owner_name`.
        sweep_first: remove what dead owners left.
        rates: also those for processor share and disk rates, where they are.
    """
    own = _own_paths(cgroup_text)
    mounts = list(_mounts(mountinfo_text))
    bases: dict[str, Path] = {}
    late = ("cpu", "blkio") if rates else ()
    for mount in mounts:
        for name in (*_CORE, "cpuacct", *late):
            if mount.version == 1 and name in mount.controllers and name not in bases:
                places = _places(mount, own.get(name, "/"), with_parent=False)
                base = _first_writable(places, owner, sweep_first)
                if base is not None:
                    bases[name] = base
    if bases.keys() & set(_CORE):
        return Controllers(1, bases, late)
    remove_directories(set(bases.values()))
    for mount in mounts:
        if mount.version == 2:
            for place in _places(mount, own.get("", "/"), with_parent=True):
                if found := _base_v2(place, owner, sweep_first, rates):
                    return found
    return None


def owner_name(pid: int | None = None, part: str = "") -> str:
    """`burnish-<pid namespace>-<pid>-<start time>`: never reused while the machine is up.

    Args:
        pid: of the process; by default our own.
        part: letters and digits, where a process has more than one such directory.
    """
    pid = pid or os.getpid()
    name = f"burnish-{os.stat('/proc/self/ns/pid').st_ino}-{pid}-{start_ticks(pid)}"
    return f"{name}-{part}" if part else name


_OWNER = re.compile(r"burnish-(\d+)-(\d+)-(\d+)(?:-[a-z0-9]+)?")


def sweep(place: Path) -> int:
    """Remove the groups under `place` whose owners are dead; return how many owners."""
    removed = 0
    namespace = os.stat("/proc/self/ns/pid").st_ino
    try:
        entries = [entry for entry in place.iterdir() if _OWNER.fullmatch(entry.name)]
    except OSError:
        return 0
    for entry in entries:
        match = _OWNER.fullmatch(entry.name)
        assert match is not None
        if int(match[1]) != namespace or start_ticks(int(match[2])) == int(match[3]):
            continue
        removed += _remove_all(entry)
    return removed


class _Mount(NamedTuple):
    version: int
    root: str
    point: Path
    controllers: frozenset[str]


def _mounts(mountinfo_text: str) -> list[_Mount]:
    found = []
    for line in mountinfo_text.splitlines():
        left, _, right = line.partition(" - ")
        fields, (kind, _, options) = left.split(), right.split(" ", 2)
        if kind in ("cgroup", "cgroup2"):
            names = frozenset(options.split(","))
            found.append(_Mount(2 if kind == "cgroup2" else 1, fields[3], Path(fields[4]), names))
    return found


def _own_paths(cgroup_text: str) -> dict[str, str]:
    """Controller -> path; the unified hierarchy is under the empty name."""
    paths = {}
    for line in cgroup_text.splitlines():
        _, names, path = line.split(":", 2)
        paths.update(dict.fromkeys(names.split(","), path))
    return paths


def _places(mount: _Mount, own: str, *, with_parent: bool) -> list[Path]:
    """Candidate parents, most specific first: limits that already hold us should go on holding.

    In version 2 a group with processes in it cannot give controllers to children, so the parent
    (a systemd slice) and the root are better places.
    """
    relative = os.path.relpath(own, mount.root)
    here = mount.point if relative.startswith("..") else mount.point / relative
    parents = [here.parent] if with_parent and here != mount.point else []
    return list(dict.fromkeys([*parents, here, mount.point]))


def _first_writable(places: list[Path], owner: str, sweep_first: bool) -> Path | None:
    for place in places:
        if sweep_first:
            sweep(place)
        try:
            make_directory(place / owner)
        except OSError:
            continue
        return place / owner
    return None


def _base_v2(place: Path, owner: str, sweep_first: bool, rates: bool) -> Controllers | None:
    """A base in `place` whose children get memory and pids at least, or None."""
    base = _first_writable([place], owner, sweep_first)
    if base is None:
        return None
    files = ControlFiles(keep_open=False)
    wanted = (*_CORE, "cpu", "io") if rates else _CORE
    for name in wanted:
        for folder in (place, base):
            files.try_write(f"{folder}/cgroup.subtree_control", f"+{name}")
    with contextlib.suppress(OSError):
        given = (base / "cgroup.subtree_control").read_text(encoding="ascii").split()
        if set(_CORE) <= set(given):
            return Controllers(2, {name: base for name in wanted if name in given})
    base.rmdir()
    return None


def _remove_all(owner: Path) -> bool:
    """Processes of a dead owner stay members until somebody reaps them: wait a little for that."""
    for _ in range(_SWEEP_TRIES):
        for box in [path for path in owner.iterdir() if path.is_dir()]:
            remove_directories([box])
        if remove_directories([owner]):
            return True
        time.sleep(_SWEEP_PAUSE_S)
    return False
