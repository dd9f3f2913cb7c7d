"""One command in one box: watch it, end it, collect what it left.

    go --> launcher says "started" --> program --> bubblewrap's monitor exits
                 |                        |                   |
            START deadline     wall, cpu, memory, output      '--> process 1 and all its
                 '------- kill the monitor <---'                   children are killed and
                                                                   awaited, pipes drained

The monitor is our child and outside the box; when it dies, process 1 of the box becomes our child
(we are a subreaper) and is killed with its whole pid namespace. So when `run` returns nothing of
the command is alive, whatever it forked, and no read waits for a pipe that somebody holds open.
"""

import asyncio
import os
import socket
import time
from collections.abc import Awaitable, Callable
from typing import NamedTuple, Protocol, TypeVar

from burnish.core.boxes import ExecResult, Limits, Usage
from burnish.sandbox.cgroup_files import Counters, Counting
from burnish.sandbox.keeper.children import readable
from burnish.sandbox.keeper.pipes import Capture, read_now
from burnish.sandbox.outcome import Cause, Evidence, classify, cpu_used_up
from burnish.sandbox.proctree import TreeUsage

T = TypeVar("T")

START_DEADLINE_S = 60.0
"""For bubblewrap itself, on a machine that is overloaded. Counts apart from the program's time."""
_TICK_S = 0.02


class Launched(Protocol):
    """A box process that has everything but its command."""

    stdout: Capture
    stderr: Capture
    started_fd: int
    """Readable, with a byte to read, once the program runs."""
    monitor_pid: int
    """Our child, which lives as long as the command."""
    root_pid: int
    """Whose descendants are the processes of the box; of an engine, process 1 itself."""
    is_complete: bool
    """After `end`: False if the box did not say that its program has ended, though it can."""
    process_1: int | None
    """Of the box, once it waits; None if there is none."""

    def go(self, stdin: bytes, script: bytes) -> None:
        """Give it its command."""
        ...

    async def end(self) -> tuple[int, float]:
        """Kill what is left; returns the monitor's status and the CPU seconds of all."""
        ...

    def listen(self, port: int) -> socket.socket | None:
        """A socket that gets what the command sends to this port; None if there is no box.

        Raises:
            OSError: it cannot be made.
        """
        ...

    def close(self) -> None:
        """Free our descriptors."""
        ...


class Command(NamedTuple):
    """What to run and how to judge it."""

    script: bytes
    """What the launcher reads."""
    stdin: bytes
    limits: Limits
    group: Counting | None
    sample: Callable[[int], TreeUsage] | None
    """Usage below a pid, where no control group counts."""
    disk_full: Callable[[], bool]


class Run:
    """One command from `go` to the end. Use once: `await Run(command, launch).result()`."""

    def __init__(
        self, command: Command, launch: Launched, reported: Awaitable[int | None] | None = None
    ) -> None:
        """Prepare; the launch is ours from now on.

        Args:
            command: what to run.
            launch: where.
            reported: gives the program's status when it ends before its box process does. Then the
                launch is not ended, and the caller's again (`kept`). None: there is no such word.
        """
        self._reported = reported
        self.kept = False
        self._command = command
        self._launch = launch
        self._trip = asyncio.Event()
        self._begin_s = time.monotonic()
        self._started_s: float | None = None
        self._before = command.group.counters() if command.group else Counters(None, 0, 0)
        self._pids_refused = 0
        self._peak_sampled = 0
        self._cpu_sampled_s = 0.0
        self._status = 0

    async def result(self) -> ExecResult:
        """Run to the end. If cancelled, everything is dead before CancelledError goes on."""
        command, launch = self._command, self._launch
        try:
            cause: Cause | None = None
            try:
                launch.go(command.stdin, command.script)
                cause = await self._watch()
            finally:
                if not self.kept:
                    ending = asyncio.ensure_future(launch.end())
                    wait_code, cpu_s = await uninterrupted(ending)
            if self.kept:
                wait_code, cpu_s = self._status, 0.0
            return self._collect(cause, wait_code, cpu_s)
        finally:
            if not self.kept:
                launch.close()

    async def _watch(self) -> Cause | None:
        """Wait for the end or for a reason to end it."""
        limit = self._command.limits.stdout_bytes
        self._launch.stdout.watch(limit, self._trip.set)
        self._launch.stderr.watch(limit, self._trip.set)
        loop = asyncio.get_running_loop()
        loop.add_reader(self._launch.started_fd, self._on_started)
        exited = asyncio.ensure_future(readable(os.pidfd_open(self._launch.monitor_pid)))
        tripped = asyncio.ensure_future(self._trip.wait())
        reported = asyncio.ensure_future(self._reported or loop.create_future())
        try:
            while True:
                left_s = self._deadline_s() - time.monotonic()
                await asyncio.wait(
                    (exited, tripped, reported),
                    timeout=max(0.0, min(_TICK_S, left_s)),
                    return_when=asyncio.FIRST_COMPLETED,
                )
                if exited.done():
                    return None
                if tripped.done():
                    return Cause.OUTPUT
                if reported.done() and (status := reported.result()) is not None:
                    self._status, self.kept = status, True
                    return None
                if cause := self._over_limit():
                    return cause
        finally:
            loop.remove_reader(self._launch.started_fd)
            for waiting in (exited, tripped, reported):
                waiting.cancel()
            await asyncio.wait((exited, tripped, reported))

    def _on_started(self) -> None:
        asyncio.get_running_loop().remove_reader(self._launch.started_fd)
        if read_now(self._launch.started_fd):
            self._started_s = time.monotonic()

    def _deadline_s(self) -> float:
        if self._started_s is None:
            return self._begin_s + START_DEADLINE_S
        return self._started_s + self._command.limits.wall_s

    def _over_limit(self) -> Cause | None:
        command, limits = self._command, self._command.limits
        if time.monotonic() >= self._deadline_s():
            return Cause.START if self._started_s is None else Cause.WALL
        if command.group is not None:
            now = command.group.counters()
            if now.oom_kills > self._before.oom_kills:
                return Cause.MEMORY
            if now.cpu_s is not None and now.cpu_s - (self._before.cpu_s or 0.0) > limits.cpu_s:
                return Cause.CPU
        if command.sample is not None:
            return self._over_sampled(command.sample(self._launch.root_pid))
        return None

    def _over_sampled(self, usage: TreeUsage) -> Cause | None:
        limits = self._command.limits
        self._peak_sampled = max(self._peak_sampled, usage.memory_bytes)
        self._cpu_sampled_s = max(self._cpu_sampled_s, usage.cpu_s)
        # Process 1 of the box is in the sum.
        self._pids_refused += usage.num_tasks - 1 >= limits.num_pids
        if usage.memory_bytes > limits.memory_bytes:
            return Cause.MEMORY
        if usage.cpu_s > limits.cpu_s:
            return Cause.CPU
        return Cause.PIDS if usage.num_tasks - 1 > limits.num_pids else None

    def _collect(self, cause: Cause | None, wait_code: int, cpu_s: float) -> ExecResult:
        command, launch = self._command, self._launch
        end_s = time.monotonic()
        stdout, stderr = launch.stdout.finish(), launch.stderr.finish()
        if self._started_s is None and read_now(launch.started_fd):
            self._started_s = self._begin_s
        now = command.group.counters() if command.group else self._before
        if now.cpu_s is not None:
            cpu_s = max(cpu_s, now.cpu_s - (self._before.cpu_s or 0.0))
        cut = launch.stdout.cut or launch.stderr.cut
        refused = now.pids_refused - self._before.pids_refused + self._pids_refused
        ending = classify(
            Evidence(
                started=self._started_s is not None,
                cause=cause,
                wait_code=wait_code,
                is_complete=launch.is_complete,
                output_cut=cut,
                oom_kills=now.oom_kills - self._before.oom_kills,
                pids_refused=refused,
                disk_full=command.disk_full(),
                stderr=stderr,
                cpu_used_up=cpu_used_up(max(cpu_s, self._cpu_sampled_s), command.limits.cpu_s),
            )
        )
        peak = command.group.peak_memory_bytes() if command.group else None
        return ExecResult(
            status=ending.status,
            exit_code=ending.exit_code,
            signal=ending.signal,
            stdout=stdout,
            stderr=stderr,
            truncated=cut,
            usage=Usage(
                wall_s=end_s - (self._started_s or self._begin_s),
                cpu_s=cpu_s,
                peak_memory_bytes=peak if peak is not None else self._peak_sampled or None,
            ),
            message=ending.message,
        )


async def uninterrupted(task: asyncio.Future[T]) -> T:
    """Wait to the end although we are being cancelled."""
    while True:
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():
                raise
