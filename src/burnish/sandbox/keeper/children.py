"""Ending and reaping the keeper's children, without blocking its event loop."""

import asyncio
import os
import signal
from typing import NamedTuple

from burnish.sandbox.proctree import read_processes


class Ended(NamedTuple):
    """How a child ended."""

    wait_code: int
    """Exit status, or minus the number of the signal that killed it."""
    cpu_s: float
    """CPU seconds of itself and all children that it waited for."""


async def readable(descriptor: int) -> None:
    """Wait until it is readable (for a pidfd: until the process is dead), then close it."""
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(descriptor, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


async def end_child(pid: int) -> Ended | None:
    """Kill if it lives, then reap. None if it is not our child: the number may be anybody's."""
    state = _state(pid)
    if state is None:
        return None
    if state == "alive":
        os.kill(pid, signal.SIGKILL)
        await readable(os.pidfd_open(pid))
    return _reap(pid)


def child_pids() -> list[int]:
    """Our own children, zombies included."""
    own = os.getpid()
    return [process.pid for process in read_processes() if process.parent == own]


def _state(pid: int) -> str | None:
    try:
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    return "alive" if ended is None else "ended"


def _reap(pid: int) -> Ended | None:
    try:
        _, status, usage = os.wait4(pid, 0)
    except ChildProcessError:  # another command took it for a stray of its own
        return None
    return Ended(os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime)
