"""One command in one box: start bubblewrap, watch it, end it, collect what it left.

    spawn --> launcher says "started" --> program --> bubblewrap's monitor exits
                   |                        |                   |
              START deadline     wall, cpu, memory, output      '--> process 1 and all its
                   '------- kill the monitor <---'                   children are killed and
                                                                     awaited, pipes drained

The monitor is our child and outside the box; when it dies, process 1 of the box becomes our child
(we are a subreaper) and is killed with its whole pid namespace. So when `run` returns nothing of
the command is alive, whatever it forked, and no read waits for a pipe that somebody holds open.
"""

import asyncio
import json
import os
import resource
import subprocess
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from burnish.core.boxes import ExecResult, Limits, Usage
from burnish.sandbox.argv import STARTED_FD
from burnish.sandbox.cgroup import BoxGroup, Counters
from burnish.sandbox.children import child_pids, end_child, readable
from burnish.sandbox.namespace import Identity, die_with_parent
from burnish.sandbox.outcome import Cause, Evidence, classify
from burnish.sandbox.pipes import Capture, above_shell, read_now, sealed
from burnish.sandbox.proctree import TreeUsage

START_DEADLINE_S = 60.0
"""For bubblewrap itself, on a machine that is overloaded. Counts apart from the program's time."""
_TICK_S = 0.02


class Command(NamedTuple):
    """All that is needed to run."""

    bwrap: str
    """Path of bubblewrap."""
    options: Callable[[int, int], bytes]
    """Given the descriptors of the filter and the info pipe: the text for `--args`."""
    program: Sequence[str]
    """What bubblewrap starts: the launcher and its arguments."""
    stdin: bytes
    seccomp: bytes
    limits: Limits
    rlimits: Sequence[tuple[int, int, int]]
    identity: Identity | None
    group: BoxGroup | None
    sample: Callable[[int], TreeUsage] | None
    """Usage below a pid, where no control group counts."""
    disk_full: Callable[[], bool]
    monitors: set[int]
    """Pids of all monitors that run under this keeper, kept by `Run`."""


class Run:
    """One command from start to end. Use once: `await Run(command).result()`."""

    def __init__(self, command: Command) -> None:
        """Prepare; nothing runs yet."""
        self._command = command
        self._trip = asyncio.Event()
        limit = command.limits.stdout_bytes
        self._stdout = Capture(limit, self._trip.set)
        self._stderr = Capture(limit, self._trip.set)
        self._info_fd, self._info_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._started_fd, self._started_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._begin_s = time.monotonic()
        self._started_s: float | None = None
        self._before = command.group.counters() if command.group else Counters(None, 0, 0)
        self._pids_refused = 0
        self._peak_sampled = 0

    async def result(self) -> ExecResult:
        """Run to the end. If cancelled, everything is dead before CancelledError goes on."""
        try:
            try:
                monitor = self._spawn()
            finally:
                self._close_passed()
            cause: Cause | None = None
            try:
                cause = await self._watch(monitor)
            finally:
                reaping = asyncio.ensure_future(self._end(monitor))
                wait_code, cpu_s = await _uninterrupted(reaping)
            return self._collect(cause, wait_code, cpu_s)
        finally:
            self._stdout.close()
            self._stderr.close()
            os.close(self._info_fd)
            os.close(self._started_fd)

    def _spawn(self) -> "subprocess.Popen[bytes]":
        command = self._command
        passed: list[int] = []
        try:
            stdin = sealed(command.stdin) if command.stdin else os.open(os.devnull, os.O_RDONLY)
            passed.append(stdin)
            passed.append(above_shell(sealed(command.seccomp)))
            passed.append(above_shell(os.dup(self._info_write)))
            passed.append(above_shell(sealed(command.options(passed[1], passed[2]))))
            monitor = subprocess.Popen(
                [command.bwrap, "--args", str(passed[3]), "--", *command.program],
                stdin=stdin,
                stdout=self._stdout.write_fd,
                stderr=self._stderr.write_fd,
                env={"PATH": os.defpath},
                cwd="/",
                close_fds=False,  # all of ours are close-on-exec; closing walks thousands
                preexec_fn=self._in_child(passed[1:]),  # safe: the keeper has one thread
            )
            command.monitors.add(monitor.pid)
            return monitor
        finally:
            for descriptor in passed:
                os.close(descriptor)

    def _in_child(self, inherit: list[int]) -> Callable[[], None]:
        """Between fork and exec of bubblewrap."""
        command = self._command
        started_write = self._started_write

        def prepare() -> None:
            for path in command.group.attach_files() if command.group else ():
                descriptor = os.open(path, os.O_WRONLY)
                os.write(descriptor, b"0")
                os.close(descriptor)
            os.dup2(started_write, STARTED_FD, inheritable=True)
            for descriptor in inherit:
                os.set_inheritable(descriptor, True)
            os.umask(0o022)
            for which, soft, hard in command.rlimits:
                resource.setrlimit(which, (soft, hard))
            if command.identity is not None:
                os.setgroups([])
                os.setresgid(*[command.identity.gid] * 3)
                os.setresuid(*[command.identity.uid] * 3)
            die_with_parent()

        return prepare

    def _close_passed(self) -> None:
        for descriptor in (
            self._stdout.write_fd,
            self._stderr.write_fd,
            self._info_write,
            self._started_write,
        ):
            os.close(descriptor)

    async def _watch(self, monitor: "subprocess.Popen[bytes]") -> Cause | None:
        """Wait for the end or for a reason to end it."""
        self._stdout.watch()
        self._stderr.watch()
        loop = asyncio.get_running_loop()
        loop.add_reader(self._started_fd, self._on_started)
        exited = asyncio.ensure_future(readable(os.pidfd_open(monitor.pid)))
        tripped = asyncio.ensure_future(self._trip.wait())
        try:
            while True:
                left_s = self._deadline_s() - time.monotonic()
                await asyncio.wait(
                    (exited, tripped),
                    timeout=max(0.0, min(_TICK_S, left_s)),
                    return_when=asyncio.FIRST_COMPLETED,
                )
                if exited.done():
                    return None
                if tripped.done():
                    return Cause.OUTPUT
                if cause := self._over_limit(monitor.pid):
                    return cause
        finally:
            loop.remove_reader(self._started_fd)
            tripped.cancel()
            exited.cancel()
            await asyncio.wait((exited, tripped))

    def _on_started(self) -> None:
        asyncio.get_running_loop().remove_reader(self._started_fd)
        if read_now(self._started_fd):
            self._started_s = time.monotonic()

    def _deadline_s(self) -> float:
        if self._started_s is None:
            return self._begin_s + START_DEADLINE_S
        return self._started_s + self._command.limits.wall_s

    def _over_limit(self, monitor_pid: int) -> Cause | None:
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
            return self._over_sampled(command.sample(monitor_pid))
        return None

    def _over_sampled(self, usage: TreeUsage) -> Cause | None:
        limits = self._command.limits
        self._peak_sampled = max(self._peak_sampled, usage.memory_bytes)
        # Process 1 of the box is in the sum.
        self._pids_refused += usage.num_tasks - 1 >= limits.num_pids
        if usage.memory_bytes > limits.memory_bytes:
            return Cause.MEMORY
        if usage.cpu_s > limits.cpu_s:
            return Cause.CPU
        return Cause.PIDS if usage.num_tasks - 1 > limits.num_pids else None

    async def _end(self, monitor: "subprocess.Popen[bytes]") -> tuple[int, float]:
        """Kill what is left. Returns bubblewrap's status and the CPU seconds of all."""
        ended = await end_child(monitor.pid)
        assert ended is not None, "somebody else reaped the monitor"
        monitor.returncode = ended.wait_code
        self._command.monitors.discard(monitor.pid)
        cpu_s = ended.cpu_s
        for pid in self._orphans():
            orphan = await end_child(pid)
            cpu_s += orphan.cpu_s if orphan else 0.0
        return ended.wait_code, cpu_s

    def _orphans(self) -> list[int]:
        """Process 1 of the box, now our child; or nobody, if the monitor saw it die."""
        text = read_now(self._info_fd)
        try:
            return [int(json.loads(text)["child-pid"])]
        except (ValueError, KeyError):
            # Killed between clone and the note: take every child that is no monitor.
            return [pid for pid in child_pids() if pid not in self._command.monitors]

    def _collect(self, cause: Cause | None, wait_code: int, cpu_s: float) -> ExecResult:
        command = self._command
        end_s = time.monotonic()
        stdout, stderr = self._stdout.finish(), self._stderr.finish()
        if self._started_s is None and read_now(self._started_fd):
            self._started_s = self._begin_s
        now = command.group.counters() if command.group else self._before
        if now.cpu_s is not None:
            cpu_s = max(cpu_s, now.cpu_s - (self._before.cpu_s or 0.0))
        cut = self._stdout.cut or self._stderr.cut
        refused = now.pids_refused - self._before.pids_refused + self._pids_refused
        ending = classify(
            Evidence(
                started=self._started_s is not None,
                cause=cause,
                wait_code=wait_code,
                output_cut=cut,
                oom_kills=now.oom_kills - self._before.oom_kills,
                pids_refused=refused,
                disk_full=command.disk_full(),
                stderr=stderr,
            )
        )
        peak = command.group.peak_memory_bytes() if command.group else None
        begin_s = self._started_s or self._begin_s
        return ExecResult(
            status=ending.status,
            exit_code=ending.exit_code,
            signal=ending.signal,
            stdout=stdout,
            stderr=stderr,
            truncated=cut,
            usage=Usage(
                wall_s=end_s - begin_s,
                cpu_s=cpu_s,
                peak_memory_bytes=peak if peak is not None else self._peak_sampled or None,
            ),
            message=ending.message,
        )


async def _uninterrupted(task: "asyncio.Future[tuple[int, float]]") -> tuple[int, float]:
    """Wait to the end although we are being cancelled."""
    while True:
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():
                raise
