"""A box process that has everything but its command.

    spawn bubblewrap --> it says who process 1 is --> control groups --> released --> launcher waits
                                                                                        |
                     the command, its input and its limits, in files that were empty <--'  go

Nothing of the command is needed before `go`, so a box can be brought to this point ahead of time.
Descriptors have fixed numbers in the child. They are placed by `posix_spawn`, which does not copy
our page tables: a fork of the keeper took 8 ms here against 0.6 ms.
"""

import asyncio
import os
import re
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from burnish.sandbox.bubblewrap.argv import LAUNCHER, Fd
from burnish.sandbox.keeper.children import child_pids, end_child
from burnish.sandbox.keeper.listening import listen_in
from burnish.sandbox.keeper.namespace import Identity
from burnish.sandbox.keeper.pipes import Capture, above_shell, read_now
from burnish.sandbox.memory_files import open_empty, seal, sealed
from burnish.sandbox.proctree import open_process

_CHILD_PID = re.compile(rb'"child-pid": (\d+)')


class Plan(NamedTuple):
    """How to start box processes for one box."""

    bwrap: str
    """Path of bubblewrap."""
    options: bytes
    """Text for `--args`."""
    seccomp: bytes
    """The filter."""
    identity: Identity | None
    """Who to run as."""
    attach: Callable[[int], Awaitable[None]] | None
    """Moves process 1 into the control groups of the box."""
    helpers: set[int]
    """Pids of the keeper's own children, which are no strays. Kept by `Launch`."""


class Launch:
    """One bubblewrap. Every way out leads through `end` and `close`."""

    def __init__(self, plan: Plan) -> None:
        """Start it.

        Raises:
            OSError: it could not be started.
        """
        self._plan = plan
        self.stdout, self.stderr = Capture(), Capture()
        self._stdin, self._script = open_empty(), open_empty()
        self._info, info = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self.started_fd, started = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        go, self._go = os.pipe2(os.O_CLOEXEC)
        block, self._block = os.pipe2(os.O_CLOEXEC)
        self._ours = [self._info, self.started_fd, self._go, self._block, *self._writable()]
        placed = {
            Fd.STDIN: self._stdin.readable,
            Fd.STDOUT: self.stdout.write_fd,
            Fd.STDERR: self.stderr.write_fd,
            Fd.GO: go,
            Fd.SCRIPT: self._script.readable,
            Fd.STARTED: started,
            Fd.ARGS: sealed(plan.options),
            Fd.SECCOMP: sealed(plan.seccomp),
            Fd.INFO: info,
            Fd.BLOCK: block,
        }
        # Sources must not be where a target goes, or one would overwrite the other.
        placed = {target: above_shell(source) for target, source in placed.items()}
        try:
            self.monitor_pid = _spawn(plan, placed)
        except OSError:
            self.close()
            raise
        finally:
            for descriptor in placed.values():
                os.close(descriptor)
        self.root_pid = self.monitor_pid
        plan.helpers.add(self.monitor_pid)

    async def prepare(self) -> None:
        """Bring the box to where it waits for its command.

        If bubblewrap fails this returns too: the monitor is dead then and stderr says why.

        Raises:
            OSError: the control groups refused.
        """
        text = b""
        while not (match := _CHILD_PID.search(text)):
            await _until_readable(self._info)
            if not (more := read_now(self._info)):
                return
            text += more
        self.process_1 = int(match[1])
        if self._plan.attach is not None:
            await self._plan.attach(self.process_1)
        _write_unless_dead(self._block)

    def go(self, stdin: bytes, script: bytes) -> None:
        """Give the launcher its command."""
        seal(self._stdin.writable, stdin)
        seal(self._script.writable, script)
        _write_unless_dead(self._go)

    def listen(self, port: int) -> socket.socket | None:
        """See `Launched`."""
        if self.process_1 is None:
            return None
        # It waits for us; dead, it stays a zombie of the monitor's or ours until `end`.
        child_fd = open_process(self.process_1)
        if child_fd is None:
            return None
        try:
            return listen_in(child_fd, port)
        finally:
            os.close(child_fd)

    async def end(self) -> tuple[int, float]:
        """Kill what is left; nothing of the box lives afterwards.

        Returns bubblewrap's status (or minus the signal that killed it) and the CPU seconds of all.
        """
        ended = await end_child(self.monitor_pid)
        assert ended is not None, "somebody else reaped the monitor"
        self._plan.helpers.discard(self.monitor_pid)
        cpu_s = ended.cpu_s
        for pid in self._orphans():
            orphan = await end_child(pid)
            cpu_s += orphan.cpu_s if orphan else 0.0
        return ended.wait_code, cpu_s

    def close(self) -> None:
        """Free our descriptors; call once."""
        self.stdout.close()
        self.stderr.close()
        for descriptor in self._ours:
            os.close(descriptor)

    process_1: int | None = None
    is_complete = True

    def _orphans(self) -> list[int]:
        """Process 1 of the box, now our child; or nobody, if the monitor saw it die."""
        if self.process_1 is None and (match := _CHILD_PID.search(read_now(self._info))):
            self.process_1 = int(match[1])
        if self.process_1 is not None:
            return [self.process_1]
        # Killed between clone and the note: take every child that we cannot account for.
        return [pid for pid in child_pids() if pid not in self._plan.helpers]

    def _writable(self) -> tuple[int, int]:
        return self._stdin.writable, self._script.writable


def _spawn(plan: Plan, placed: dict[Fd, int]) -> int:
    actions = [(os.POSIX_SPAWN_DUP2, source, int(target)) for target, source in placed.items()]
    command = [plan.bwrap, "--args", str(int(Fd.ARGS)), "--", *LAUNCHER]
    with _acting_as(plan.identity):
        return os.posix_spawn(
            plan.bwrap,
            command,
            {"PATH": os.defpath},
            file_actions=actions,
            setsigdef=[signal.SIGPIPE, signal.SIGXFSZ],  # Python ignores both
        )


@contextmanager
def _acting_as(identity: Identity | None) -> Iterator[None]:
    """Change our user for a moment. The saved id lets us come back; exec drops it for the child."""
    if identity is None:
        yield
        return
    os.setresgid(identity.gid, identity.gid, 0)
    os.setresuid(identity.uid, identity.uid, 0)
    try:
        yield
    finally:
        os.setresuid(0, 0, 0)
        os.setresgid(0, 0, 0)


async def _until_readable(descriptor: int) -> None:
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(descriptor, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(descriptor)


def _write_unless_dead(descriptor: int) -> None:
    try:
        os.write(descriptor, b"\n")
    except BrokenPipeError:
        return
