"""The processes of a box as the host sees them: the fallback where no control group counts.

A pid namespace adopts its own orphans, so the tree below bubblewrap is always complete.
"""

import errno
import os
from collections.abc import Iterable
from typing import NamedTuple

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Process(NamedTuple):
    """One line of `/proc/<pid>/stat`."""

    pid: int
    parent: int
    num_threads: int
    cpu_s: float
    """Its own and that of the children it has waited for."""
    start_ticks: int
    rss_bytes: int
    dead: bool = False
    """It ended, but nobody has reaped it yet."""


class TreeUsage(NamedTuple):
    """Totals of a tree."""

    num_tasks: int
    """Threads."""
    cpu_s: float
    memory_bytes: int
    """Resident, pages shared between processes counted once per process."""


def parse_stat(text: str) -> Process:
    """The name in parentheses may hold anything, so fields count from the last `)`."""
    head, _, tail = text.rpartition(")")
    fields = tail.split()
    return Process(
        pid=int(head.split(" ", 1)[0]),
        parent=int(fields[1]),
        num_threads=int(fields[17]),
        cpu_s=sum(int(field) for field in fields[11:15]) / _TICKS_PER_S,
        start_ticks=int(fields[19]),
        rss_bytes=max(0, int(fields[21])) * _PAGE_BYTES,
        dead=fields[0] in "ZX",
    )


def read_processes() -> list[Process]:
    """All that are visible now."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit() and (process := read_process(int(name))):
            found.append(process)
    return found


def read_process(pid: int) -> Process | None:
    """None if it is gone."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return parse_stat(file.read())
    except (FileNotFoundError, ProcessLookupError):
        return None


def open_process(pid: int) -> int | None:
    """Its pidfd; None if it is gone.

    Linux 6.1 says EINVAL of a process that is gone while its number still names a session or group.
    """
    try:
        return os.pidfd_open(pid)
    except OSError as error:
        if error.errno in (errno.ESRCH, errno.EINVAL):
            return None
        raise


def start_ticks(pid: int) -> int:
    """Start time in clock ticks since boot, which with the pid names a process; -1 if dead."""
    process = read_process(pid)
    return -1 if process is None or process.dead else process.start_ticks


def tree_usage(processes: Iterable[Process], root: int, *, with_root: bool = False) -> TreeUsage:
    """Sum over the descendants of `root`, and `root` itself if asked for."""
    children: dict[int, list[Process]] = {}
    counted: list[Process] = []
    for process in processes:
        children.setdefault(process.parent, []).append(process)
        if with_root and process.pid == root:
            counted.append(process)
    waiting = [root]
    while waiting:
        found = children.pop(waiting.pop(), ())
        counted += found
        waiting += [process.pid for process in found]
    return TreeUsage(
        sum(process.num_threads for process in counted),
        sum(process.cpu_s for process in counted),
        sum(process.rss_bytes for process in counted),
    )
