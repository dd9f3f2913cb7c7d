"""How many boxes the limits of this process and host leave room for.

A pool asks before it starts its first helper: what is missing then is one line with a command, not
the failure of a box in the middle of a run.
"""

import resource
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from burnish.sandbox.cgroup import Controllers
from burnish.sandbox.limits import TooManyBoxes
from burnish.sandbox.native.box_process import found_again

# Of a live box: its control socket and the directory that it writes to, and while a command runs
# the ends of two pipes.
_FILES_PER_BOX = 4
_FILES_PER_GROUP = 8
_FILES_ELSEWHERE = 512
# Process 1 of a box and a command.
_TASKS_PER_BOX = 2
# Of helpers, and of boxes made ahead.
_SPARE = 64
# Half of what is measured for an idle box is memory that the kernel does not charge to it.
_BOX_BYTES = 1.25 * 2**20
_NAMESPACES = ("user", "mnt", "pid", "net", "ipc", "uts", "cgroup")
# The kernel numbers memory groups with 16 bits.
_MAX_MEMORY_GROUPS = 2**16 - 1
_UNLIMITED = 2**60
_NO_BOUND = 2**50


class Bound(NamedTuple):
    """One limit."""

    most: int
    """Boxes that it leaves room for."""
    what: str
    """Its name and value, for people."""
    fix: str
    """How it is raised."""


class Host(NamedTuple):
    """Where limits are found."""

    max_files: int
    """Hard limit of open files of this process."""
    max_processes: int
    """Of this user; `_UNLIMITED` for whom it does not hold."""
    proc: Path = Path("/proc")


def this_host() -> Host:
    """The one we run on."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    processes = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    # The kernel exempts root of the host only, who sees all ids mapped to themselves.
    return Host(_number(files), _UNLIMITED if _is_root(Path("/proc")) else _number(processes))


def bounds(controllers: Controllers | None, host: Host, *, on_disk: bool = False) -> list[Bound]:
    """Every limit that boxes count against, the tightest first; memory is not among them."""
    found = [
        _files(controllers, host, on_disk),
        _processes(host),
        *_namespaces(host.proc),
        *_groups(controllers, host.proc),
    ]
    return sorted((b for b in found if b.most < _NO_BOUND), key=lambda bound: bound.most)


def memory_bound(host: Host) -> Bound:
    """Idle boxes that fit into free memory: advice, as boxes in use take what they are given."""
    for line in (host.proc / "meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
            what = f"{free / 2**30:.1f} GiB of free memory"
            return Bound(int(free / _BOX_BYTES), what, "close other programs")
    return Bound(_UNLIMITED, "memory", "")


def make_room(
    num_boxes: int,
    controllers: Controllers | None,
    host: Host | None = None,
    *,
    on_disk: bool = False,
) -> bool:
    """Raise our own limit of open files to what so many boxes need.

    Returns:
        Whether there is room to keep the files of control groups open too.

    Raises:
        TooManyBoxes: a limit that we cannot raise is too low.
    """
    host = host or this_host()
    found = bounds(controllers, host, on_disk=on_disk)
    if found and num_boxes > found[0].most:
        tightest = found[0]
        most = max(0, tightest.most)
        raise TooManyBoxes(
            f"{num_boxes} boxes are too many: {tightest.what} leave room for {most}.",
            fix=f"{tightest.fix}, or sandbox.max_boxes + sandbox.warm_boxes <= {most}",
        )
    needed = num_boxes * _files_per_box(controllers, on_disk) + _FILES_ELSEWHERE
    wanted = needed + num_boxes * _FILES_PER_GROUP
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    raised = min(wanted, host.max_files)
    if _number(soft) < raised:
        resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
    return host.max_files >= wanted


def _number(limit: int) -> int:
    return _UNLIMITED if limit == resource.RLIM_INFINITY else limit


def _files_per_box(controllers: Controllers | None, on_disk: bool = False) -> int:
    """Also a pidfd where processes cannot be found again, a peak of version 2, a disk's mount."""
    with_peak = controllers is not None and controllers.version == 2
    return _FILES_PER_BOX + with_peak + (not found_again()) + on_disk


def _files(controllers: Controllers | None, host: Host, on_disk: bool) -> Bound:
    most = (host.max_files - _FILES_ELSEWHERE) // _files_per_box(controllers, on_disk)
    what = f"{host.max_files} open files of this process (ulimit -Hn)"
    return Bound(most, what, "raise the limit as root: ulimit -Hn 1048576; ulimit -n 1048576")


def _processes(host: Host) -> Bound:
    """The number of tasks is that of the whole host: those of this user alone are not counted."""
    tasks = int((host.proc / "loadavg").read_text(encoding="ascii").split()[3].partition("/")[2])
    limits = [(host.max_processes, "processes of this user (ulimit -u)", "ulimit -u unlimited")]
    for name in ("pid_max", "threads-max"):
        value = _read(host.proc / "sys/kernel" / name)
        fix = f"sudo sysctl -w kernel.{name}=4194304"
        limits.append((value - tasks, f"processes of this host (kernel.{name})", fix))
    left, what, fix = min(limits)
    return Bound((left - _SPARE) // _TASKS_PER_BOX, f"{max(0, left)} more {what}", fix)


def _namespaces(proc: Path) -> Iterator[Bound]:
    for kind in _NAMESPACES:
        name = f"user.max_{kind}_namespaces"
        value = _read(proc / "sys" / name.replace(".", "/"))
        # With fewer no helper starts, and its own words say more.
        if value > _SPARE:
            what = f"{value} name spaces ({name})"
            yield Bound(value - _SPARE, what, f"sudo sysctl -w {name}=1048576")


def _groups(controllers: Controllers | None, proc: Path) -> Iterator[Bound]:
    if controllers is None:
        return
    bases = controllers.bases
    if "memory" in bases:
        used = _memory_groups(proc)
        what = f"{_MAX_MEMORY_GROUPS - used} more memory groups of the kernel"
        yield Bound(_MAX_MEMORY_GROUPS - used - _SPARE, what, "end what else makes control groups")
    for place in bases["pids"].parents if "pids" in bases else ():
        left = _read(place / "pids.max") - _read(place / "pids.current", 0)
        fix = f"echo max > {place}/pids.max as root"
        what = f"{max(0, left)} more processes in {place}/pids.max"
        yield Bound((left - _SPARE) // _TASKS_PER_BOX, what, fix)
    for place in bases["memory"].parents if controllers.version == 2 else ():
        most = _read(place / "cgroup.max.descendants")
        fix = f"echo max > {place}/cgroup.max.descendants as root"
        yield Bound(most - _SPARE, f"{most} groups in {place}/cgroup.max.descendants", fix)


def _memory_groups(proc: Path) -> int:
    for line in (proc / "cgroups").read_text(encoding="ascii").splitlines():
        if line.startswith("memory\t"):
            return int(line.split()[2])
    return 0


def _read(path: Path, otherwise: int = _UNLIMITED) -> int:
    """A number in a file; `otherwise` where there is no such file, or it says "max"."""
    try:
        text = path.read_text(encoding="ascii").strip()
    except OSError:
        return otherwise
    return int(text) if text.isdecimal() else otherwise


def _is_root(proc: Path) -> bool:
    status = (proc / "self/status").read_text(encoding="ascii")
    uid = next(line.split()[2] for line in status.splitlines() if line.startswith("Uid:"))
    mapped = (proc / "self/uid_map").read_text(encoding="ascii").split()
    return uid == "0" and mapped[:2] == ["0", "0"]
