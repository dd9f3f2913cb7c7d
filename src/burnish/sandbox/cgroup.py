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
# Not the name of an owner: it stays, with whoever was moved into it.
_MEMBERS = "burnish-members"
# Who forks while we move is found by the next look.
_MOVE_TRIES = 10


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
    unified = [mount for mount in mounts if mount.version == 2]
    for mount in unified:
        for place in _places(mount, own.get("", "/"), with_parent=True):
            if found := _base_v2(place, owner, sweep_first, rates):
                return found
    for mount in unified:
        here = _here(mount, own.get("", "/"))
        if _vacate(here) and (found := _base_v2(here, owner, sweep_first, rates)):
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
    try:
        entries = [entry for entry in place.iterdir() if is_dead_owner(entry.name)]
    except OSError:
        return 0
    return sum(_remove_all(entry) for entry in entries)


def is_dead_owner(name: str) -> bool:
    """Whether a name from `owner_name` is of a process of our namespace that is gone."""
    match = _OWNER.fullmatch(name)
    if match is None or int(match[1]) != os.stat("/proc/self/ns/pid").st_ino:
        return False
    return start_ticks(int(match[2])) != int(match[3])


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
    here = _here(mount, own)
    parents = [here.parent] if with_parent and here != mount.point else []
    return list(dict.fromkeys([*parents, here, mount.point]))


def _here(mount: _Mount, own: str) -> Path:
    """Our own group, or what is mounted if that lies outside."""
    relative = os.path.relpath(own, mount.root)
    return mount.point if relative.startswith("..") else mount.point / relative


def _vacate(place: Path) -> bool:
    """Move the processes of a group that was given to us into a child of it; True if none is left.

    Who is started in a group of version 2 that is its own (a service with `Delegate=yes`, a
    container that may write to its groups) has to do that before children can get controllers. All
    limits of the group go on holding, and service managers look for processes in the whole tree.
    """
    members = place / _MEMBERS
    with contextlib.suppress(OSError):
        given = (place / "cgroup.controllers").read_text(encoding="ascii").split()
        # Root may write everywhere and has a better place; only a group that is ours is worth it.
        if set(_CORE) <= set(given) and os.access(place / "cgroup.subtree_control", os.W_OK):
            if move_members(place, members):
                return True
            remove_directories([members])
    return False


def move_members(source: Path, destination: Path) -> bool:
    """Move all processes from one group of version 2 to another; True if none is left.

    Raises:
        OSError: we may not.
    """
    for _ in range(_MOVE_TRIES):
        pids = (source / "cgroup.procs").read_text(encoding="ascii").split()
        # What shows as 0 is of another pid namespace: we cannot name it.
        if not pids or "0" in pids:
            return not pids
        make_directory(destination)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                (destination / "cgroup.procs").write_text(pid, encoding="ascii")
    return False


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
    # Both at once, and nothing else unless they were given: where processes are in the group, the
    # kernel gives `pids` and `cpu` alone and makes it a threaded one, without a place for boxes.
    _enable(place, base, *_CORE)
    if _enabled(base) >= set(_CORE):
        rest = ("cpu", "io") if rates else ()
        for name in rest:
            _enable(place, base, name)
        given = _enabled(base)
        return Controllers(2, {name: base for name in (*_CORE, *rest) if name in given})
    base.rmdir()
    return None


def _enable(place: Path, base: Path, *names: str) -> None:
    files = ControlFiles(keep_open=False)
    for folder in (place, base):
        files.try_write(f"{folder}/cgroup.subtree_control", " ".join(f"+{name}" for name in names))


def _enabled(folder: Path) -> set[str]:
    with contextlib.suppress(OSError):
        return set((folder / "cgroup.subtree_control").read_text(encoding="ascii").split())
    return set()


def _remove_all(owner: Path) -> bool:
    """Processes of a dead owner stay members until somebody reaps them: wait a little for that."""
    for _ in range(_SWEEP_TRIES):
        for box in [path for path in owner.iterdir() if path.is_dir()]:
            remove_directories([box])
        if remove_directories([owner]):
            return True
        time.sleep(_SWEEP_PAUSE_S)
    return False
