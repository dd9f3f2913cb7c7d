"""What the control groups of a box do, and how their files are read and written."""

import contextlib
import errno
import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple, Protocol

from burnish.core.boxes import Limits

# Process 1 of the box is in the group; the monitor is not, so that no limit of the box kills it.
OVERHEAD_PIDS = 1
CPU_PERIOD_US = 100_000
_MAX_READ_BYTES = 4096


class Counters(NamedTuple):
    """Totals of a box since it was made."""

    cpu_s: float | None
    oom_kills: int
    pids_refused: int


class Counting(Protocol):
    """Who counts what a box uses."""

    def counters(self) -> Counters:
        """Current totals."""
        ...

    def peak_memory_bytes(self) -> int | None:
        """Highest usage since the limits were set."""
        ...


class BoxGroup(Counting, Protocol):
    """The control groups of one box."""

    into_directory: bool
    """`entry_fds` is one directory for `clone3(CLONE_INTO_CGROUP)`, not `cgroup.procs` files."""

    slows_writeback: bool
    """Rates hold for what the kernel writes for a process later, too."""

    @property
    def reusable(self) -> bool:
        """Whether the next box in it would be told nothing of this one."""
        ...

    def set_limits(self, limits: Limits) -> None:
        """Apply them to the next command."""
        ...

    def attach_files(self) -> tuple[str, ...]:
        """Files into which a pid is written to make it a member."""
        ...

    def entry_fds(self) -> tuple[int, ...]:
        """Open descriptors through which a helper makes a process a member."""
        ...

    def entered(self) -> None:
        """`entry_fds` are not needed any more."""
        ...

    def must_join(self, limits: Limits) -> bool:
        """Whether `join` has to run before these limits hold."""
        ...

    def join(self, pid: int) -> None:
        """Move all that runs in the box whose process 1 is `pid` into trees left out so far.

        Can wait for the kernel for 10 ms.
        """
        ...

    def held_bytes(self) -> int:
        """Memory charged now: files of layers stay charged to the box that wrote them."""
        ...

    def left(self) -> None:
        """The box is gone: whoever gets the groups next has joined nothing."""
        ...

    def delete(self) -> bool:
        """Delete the groups; False if a dying process still holds one."""
        ...

    def remove(self) -> bool:
        """`close` and `delete`."""
        ...

    def close(self) -> None:
        """Free the descriptors. May be called again."""
        ...


class ControlFiles:
    """Control files by path, kept open where that saves time."""

    def __init__(self, *, keep_open: bool) -> None:
        """Open nothing yet; `keep_open` costs up to eight descriptors for each box."""
        self._keep_open = keep_open
        self._open: dict[tuple[str, int], int] = {}

    def read(self, path: str, flags: int = os.O_RDONLY) -> bytes:
        """The content; `flags` where it is also written (`rewrite`)."""
        if not self._keep_open:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                return os.pread(descriptor, _MAX_READ_BYTES, 0)
            finally:
                os.close(descriptor)
        return os.pread(self.descriptor(path, flags), _MAX_READ_BYTES, 0)

    def members(self, path: str) -> list[int]:
        """The processes in a `cgroup.procs`.

        Never through a file that stays open: version 1 shows who was there a second ago.
        """
        return [int(word) for word in Path(path).read_bytes().split()]

    def write(self, path: str, value: str) -> None:
        """Write once; control files take a value as a whole."""
        descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(descriptor, value.encode("ascii"))
        finally:
            os.close(descriptor)

    def rewrite(self, path: str, value: str) -> None:
        """The same for a file that is also read: by one descriptor, where files stay open."""
        if self._keep_open:
            os.pwrite(self.descriptor(path, os.O_RDWR), value.encode("ascii"), 0)
        else:
            self.write(path, value)

    def try_write(self, path: str, value: str) -> bool:
        """Write if the kernel has such a file and takes the value."""
        with contextlib.suppress(OSError):
            self.write(path, value)
            return True
        return False

    def field(self, path: str, name: bytes) -> int:
        """The number after `name` at the start of a line; 0 if there is none."""
        try:
            text = b"\n" + self.read(path)
        except FileNotFoundError:
            return 0
        _, found, rest = text.partition(b"\n" + name + b" ")
        return int(rest.partition(b"\n")[0]) if found else 0

    def descriptor(self, path: str, flags: int) -> int:
        """Opened once, and the same from then on."""
        key = (path, flags)
        descriptor = self._open.get(key)
        if descriptor is None:
            descriptor = self._open[key] = os.open(path, flags | os.O_CLOEXEC)
        return descriptor

    def trim(self) -> None:
        """Free the descriptors, unless they are to stay open."""
        if not self._keep_open:
            self.close()

    def close(self) -> None:
        """Free the descriptors."""
        while self._open:
            os.close(self._open.popitem()[1])


def make_directory(path: Path) -> None:
    """The kernel can answer ENOMEM under page-cache pressure (4 of 4,000 tries): try again."""
    for attempt in range(3):
        try:
            path.mkdir(exist_ok=True)
        except OSError as error:
            if error.errno != errno.ENOMEM or attempt == 2:
                raise
        else:
            return


def remove_directories(paths: Iterable[Path]) -> bool:
    """Delete empty groups; True if none is left."""
    gone = True
    for path in paths:
        try:
            path.rmdir()
        except FileNotFoundError:
            continue
        except OSError:
            gone = False
    return gone


def disks(blocks: Path = Path("/sys/block")) -> tuple[str, ...]:
    """`major:minor` of every disk that holds anything."""
    found = []
    for disk in sorted(blocks.iterdir()) if blocks.is_dir() else ():
        with contextlib.suppress(OSError):
            if int((disk / "size").read_text(encoding="ascii")) > 0:
                found.append((disk / "dev").read_text(encoding="ascii").strip())
    return tuple(found)


class GroupLimits(NamedTuple):
    """What a group is told; the rest of `Limits` is kept by others."""

    memory_bytes: int
    swap_bytes: int
    num_pids: int
    cpus: float | None
    read_bytes_per_s: int | None
    write_bytes_per_s: int | None


def group_limits(limits: Limits) -> GroupLimits:
    """That part of the limits."""
    return GroupLimits(
        limits.memory_bytes,
        limits.swap_bytes,
        limits.num_pids,
        limits.cpus,
        limits.read_bytes_per_s,
        limits.write_bytes_per_s,
    )


def cpu_quota_us(limits: Limits) -> int | None:
    """Microseconds of processor time in each `CPU_PERIOD_US`."""
    return None if limits.cpus is None else max(1000, int(limits.cpus * CPU_PERIOD_US))
