"""Control groups: the exact limits, where the host lets us have them.

Version 1 has one tree per controller, version 2 one for all; an ordinary user often has neither.
Groups are named after the process that owns them, so that the next start can remove what a killed
owner left (`sweep`). They hold no process by then: every box dies with its keeper.
"""

import contextlib
import errno
import os
import re
import time
from pathlib import Path
from typing import NamedTuple, Protocol

from burnish.core.boxes import Limits
from burnish.sandbox.proctree import start_ticks

# Process 1 of the box is in the group; the monitor is not, so that no limit of the box kills it.
OVERHEAD_PIDS = 1

_SWEEP_TRIES, _SWEEP_PAUSE_S = 100, 0.01


class Counters(NamedTuple):
    """Totals of a box since it was made."""

    cpu_s: float | None
    oom_kills: int
    pids_refused: int


class BoxGroup(Protocol):
    """The control groups of one box."""

    def set_limits(self, limits: Limits) -> None:
        """Apply them to the next command."""
        ...

    def attach_files(self) -> tuple[str, ...]:
        """Files into which a pid is written to make it a member."""
        ...

    def counters(self) -> Counters:
        """Current totals."""
        ...

    def peak_memory_bytes(self) -> int | None:
        """Highest usage since `set_limits`."""
        ...

    def remove(self) -> bool:
        """Delete the groups; False if a dying process still holds one."""
        ...


class Controllers(NamedTuple):
    """Where groups can be made, and with what power."""

    version: int
    """1 or 2."""
    bases: dict[str, Path]
    """Controller -> directory of this owner. Version 2 has the same one for all."""

    @property
    def memory(self) -> bool:
        """Whether memory is limited exactly."""
        return "memory" in self.bases

    @property
    def pids(self) -> bool:
        """Whether processes are counted exactly."""
        return "pids" in self.bases

    def make(self, box: str) -> BoxGroup:
        """Groups for one box."""
        made = {name: base / box for name, base in self.bases.items()}
        for directory in set(made.values()):
            _make_directory(directory)
        return GroupV1(made) if self.version == 1 else GroupV2(made)

    def close(self) -> None:
        """Remove this owner's own directories, which must be empty."""
        for base in set(self.bases.values()):
            with contextlib.suppress(OSError):
                base.rmdir()


class GroupV1:
    """One directory in each controller's tree."""

    def __init__(self, directories: dict[str, Path]) -> None:
        """Wrap existing directories."""
        self._dirs = directories

    def set_limits(self, limits: Limits) -> None:
        """Memory is set twice as the swap limit may never be below it; order depends on the old."""
        if memory := self._dirs.get("memory"):
            value = str(limits.memory_bytes)
            names = ["memory.limit_in_bytes"]
            if (memory / "memory.memsw.limit_in_bytes").exists():
                names = ["memory.limit_in_bytes", "memory.memsw.limit_in_bytes"]
            else:
                _write_if_possible(memory / "memory.swappiness", "0")
            _write_in_either_order([memory / name for name in names], value)
            _write_if_possible(memory / "memory.max_usage_in_bytes", "0")
        if pids := self._dirs.get("pids"):
            _write(pids / "pids.max", str(limits.num_pids + OVERHEAD_PIDS))

    def attach_files(self) -> tuple[str, ...]:
        """One per tree."""
        return tuple(str(path / "cgroup.procs") for path in self._dirs.values())

    def counters(self) -> Counters:
        """Read every controller that we have."""
        cpu = self._dirs.get("cpuacct")
        memory = self._dirs.get("memory")
        pids = self._dirs.get("pids")
        return Counters(
            cpu_s=int(_read(cpu / "cpuacct.usage")) / 1e9 if cpu else None,
            oom_kills=_field(memory / "memory.oom_control", "oom_kill") if memory else 0,
            pids_refused=_field(pids / "pids.events", "max") if pids else 0,
        )

    def peak_memory_bytes(self) -> int | None:
        """Reset by `set_limits`."""
        memory = self._dirs.get("memory")
        return int(_read(memory / "memory.max_usage_in_bytes")) if memory else None

    def remove(self) -> bool:
        """Try each tree."""
        removed = [_remove(path) for path in self._dirs.values()]
        return all(removed)


class GroupV2:
    """One directory for all controllers."""

    def __init__(self, directories: dict[str, Path]) -> None:
        """Wrap an existing directory."""
        self._names = frozenset(directories)
        self._dir = next(iter(directories.values()))

    def set_limits(self, limits: Limits) -> None:
        """Kill the whole box on out-of-memory, never a part of it."""
        if "memory" in self._names:
            _write(self._dir / "memory.max", str(limits.memory_bytes))
            _write_if_possible(self._dir / "memory.swap.max", "0")
            _write_if_possible(self._dir / "memory.oom.group", "1")
            _write_if_possible(self._dir / "memory.peak", "0")
        if "pids" in self._names:
            _write(self._dir / "pids.max", str(limits.num_pids + OVERHEAD_PIDS))

    def attach_files(self) -> tuple[str, ...]:
        """The one file."""
        return (str(self._dir / "cgroup.procs"),)

    def counters(self) -> Counters:
        """`cpu.stat` exists in every group, even without the cpu controller."""
        cpu_us = _field(self._dir / "cpu.stat", "usage_usec", default=-1)
        return Counters(
            cpu_s=cpu_us / 1e6 if cpu_us >= 0 else None,
            oom_kills=_field(self._dir / "memory.events", "oom_kill")
            if "memory" in self._names
            else 0,
            pids_refused=_field(self._dir / "pids.events", "max") if "pids" in self._names else 0,
        )

    def peak_memory_bytes(self) -> int | None:
        """Since the box was made where the kernel (< 6.12) cannot reset it."""
        try:
            return int(_read(self._dir / "memory.peak"))
        except OSError:
            return None

    def remove(self) -> bool:
        """Delete the group."""
        return _remove(self._dir)


def find_controllers(
    cgroup_text: str, mountinfo_text: str, owner: str, *, sweep_first: bool = True
) -> Controllers | None:
    """Make this owner's base directories in the best hierarchy that lets us.

    Args:
        cgroup_text: `/proc/self/cgroup`.
        mountinfo_text: `/proc/self/mountinfo`.
        owner: name from `owner_name`.
        sweep_first: remove what dead owners left.
    """
    own = _own_paths(cgroup_text)
    mounts = list(_mounts(mountinfo_text))
    bases: dict[str, Path] = {}
    for mount in mounts:
        for name in ("memory", "pids", "cpuacct"):
            if mount.version == 1 and name in mount.controllers and name not in bases:
                places = _places(mount, own.get(name, "/"), with_parent=False)
                base = _first_writable(places, owner, sweep_first)
                if base is not None:
                    bases[name] = base
    if bases.keys() & {"memory", "pids"}:
        return Controllers(1, bases)
    for base in bases.values():
        base.rmdir()
    for mount in mounts:
        if mount.version == 2:
            for place in _places(mount, own.get("", "/"), with_parent=True):
                if found := _base_v2(place, owner, sweep_first):
                    return found
    return None


def owner_name(pid: int | None = None) -> str:
    """`burnish-<pid namespace>-<pid>-<start time>`: never reused while the machine is up."""
    pid = pid or os.getpid()
    return f"burnish-{os.stat('/proc/self/ns/pid').st_ino}-{pid}-{start_ticks(pid)}"


_OWNER = re.compile(r"burnish-(\d+)-(\d+)-(\d+)")


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
            _make_directory(place / owner)
        except OSError:
            continue
        return place / owner
    return None


def _base_v2(place: Path, owner: str, sweep_first: bool) -> Controllers | None:
    """A base in `place` whose children get memory and pids, or None."""
    base = _first_writable([place], owner, sweep_first)
    if base is None:
        return None
    wanted = ("memory", "pids")
    for name in wanted:
        _write_if_possible(place / "cgroup.subtree_control", f"+{name}")
        _write_if_possible(base / "cgroup.subtree_control", f"+{name}")
    with contextlib.suppress(OSError):
        if set(wanted) <= set(_read(base / "cgroup.subtree_control").split()):
            return Controllers(2, dict.fromkeys(wanted, base))
    base.rmdir()
    return None


def _make_directory(path: Path) -> None:
    """The kernel can answer ENOMEM under page-cache pressure (4 of 4,000 tries): try again."""
    for attempt in range(3):
        try:
            path.mkdir(exist_ok=True)
        except OSError as error:
            if error.errno != errno.ENOMEM or attempt == 2:
                raise
        else:
            return


def _remove_all(owner: Path) -> bool:
    """Processes of a dead owner stay members until somebody reaps them: wait a little for that."""
    for _ in range(_SWEEP_TRIES):
        for box in [path for path in owner.iterdir() if path.is_dir()]:
            _remove(box)
        if _remove(owner):
            return True
        time.sleep(_SWEEP_PAUSE_S)
    return False


def _remove(path: Path) -> bool:
    try:
        path.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def _read(path: Path) -> str:
    return path.read_text(encoding="ascii").strip()


def _write(path: Path, value: str) -> None:
    descriptor = os.open(path, os.O_WRONLY)
    try:
        os.write(descriptor, value.encode("ascii"))
    finally:
        os.close(descriptor)


def _write_if_possible(path: Path, value: str) -> None:
    with contextlib.suppress(OSError):
        _write(path, value)


def _write_in_either_order(paths: list[Path], value: str) -> None:
    try:
        for path in paths:
            _write(path, value)
    except OSError:
        for path in reversed(paths):
            _write(path, value)


def _field(path: Path, name: str, default: int = 0) -> int:
    try:
        text = path.read_text(encoding="ascii")
    except OSError:
        return default
    for line in text.splitlines():
        key, _, value = line.partition(" ")
        if key == name:
            return int(value)
    return default
