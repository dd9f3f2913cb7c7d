"""One command in a live box: one message to its init, one back, and an eye on the limits between.

    EXEC --> init starts the program ------------------> EXITED (all of it is dead)
              |  after 5 ms: read the pipes; look at the counters every 20 to 200 ms
              |  over a limit, or cancelled: KILL ------> EXITED
              '- no answer `GRACE_S` past the wall clock: the box is killed by pidfd

Most commands end within 5 ms; nothing is read or watched for them but the one reply.
"""

import asyncio
import errno
import os
import time
from typing import NamedTuple

from burnish.core.boxes import ExecResult, ExecStatus, Limits, Usage
from burnish.core.errors import ClassifiedFailure, UserError
from burnish.sandbox.commands import WORK
from burnish.sandbox.memory_files import sealed
from burnish.sandbox.native import wire
from burnish.sandbox.native.gauge import Gauge, Totals
from burnish.sandbox.native.init import GRACE_S, Init
from burnish.sandbox.native.protocol import HEADER, MAX_MESSAGE_BYTES, Ending, Flag, Op
from burnish.sandbox.native.wire import BadReply, Exited
from burnish.sandbox.outcome import Cause, Seen, cpu_used_up, infra_error, judge, refused
from burnish.sandbox.outcome import Ending as Verdict

# Watching two pipes costs 80 us, and with all processors busy most commands still end before this.
_FIRST_LOOK_S = 0.005
_CHUNK_BYTES = 64 * 2**10
# With less than that left ext4 refuses a new file, which takes a block for its map as well.
_NEW_FILE_BLOCKS = 4
_NO_FILE = (errno.ENOENT, errno.ENOTDIR)
# What a file, its interpreter or the command line can do to execve and chdir; all else is ours.
_NO_PROGRAM = frozenset(
    {
        errno.EACCES, errno.ENOEXEC, errno.E2BIG, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG,
        errno.EINVAL, errno.ETXTBSY, errno.ELIBBAD, errno.EPERM, errno.ENXIO, errno.EIO,
    }
)  # fmt: skip


class Request(NamedTuple):
    """What to run."""

    job: wire.Job
    stdin: bytes
    limits: Limits
    keep: bool
    packages: bool


class Stream:
    """The first bytes of a pipe."""

    __slots__ = ("_chunks", "_size", "cut", "ended", "fd", "write_fd")

    def __init__(self) -> None:
        """Make the pipe."""
        self.fd, self.write_fd = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self.fd, False)
        self._chunks: list[bytes] = []
        self._size = 0
        self.cut = self.ended = False

    def pull(self, limit: int) -> bool:
        """Read once and keep up to `limit` bytes in all; False if there is no more to be had."""
        try:
            chunk = os.read(self.fd, _CHUNK_BYTES)
        except BlockingIOError:
            return False
        if not chunk:
            self.ended = True
            return False
        kept = chunk[: limit - self._size]
        self._chunks.append(kept)
        self._size += len(kept)
        self.cut = len(kept) < len(chunk)
        return not self.cut

    def drain(self, limit: int) -> bytes:
        """All that was kept and is there now; never waits."""
        while not (self.cut or self.ended) and self.pull(limit):
            pass
        return b"".join(self._chunks)

    def close_write(self) -> None:
        """The program has its own."""
        os.close(self.write_fd)
        self.write_fd = -1

    def close(self) -> None:
        """Free what is left."""
        os.close(self.fd)
        if self.write_fd >= 0:
            os.close(self.write_fd)


class Run:
    """One command. Use once: `await Run(...).result()`."""

    def __init__(self, init: Init, gauge: Gauge, request: Request, null_fd: int) -> None:
        """Prepare; `null_fd` is `/dev/null` open for reading."""
        self._init = init
        self._gauge = gauge
        self._request = request
        self._null_fd = null_fd
        self._limit = request.limits.stdout_bytes
        self._loop = asyncio.get_running_loop()
        self._wake: asyncio.Future[None] = self._loop.create_future()
        self._number = 0
        self._cause: Cause | None = None
        self._exited: Exited | None = None
        self._trouble = ""
        self._timer: asyncio.TimerHandle | None = None
        self._watching = False
        self._deadline_s = time.monotonic() + request.limits.wall_s + GRACE_S

    async def result(self) -> ExecResult:
        """Run to the end. If cancelled, everything is dead before CancelledError goes on."""
        self._out = Stream()
        try:
            self._err = Stream()
            try:
                return await self._result()
            finally:
                self._err.close()
        finally:
            self._out.close()

    async def _result(self) -> ExecResult:
        try:
            self._send()
        except ClassifiedFailure as error:
            return infra_error(error.failure.message)
        finally:
            self._out.close_write()
            self._err.close_write()
        self._loop.add_reader(self._init.fileno, self._on_reply)
        self._timer = self._loop.call_later(_FIRST_LOOK_S, self._look)
        try:
            await self._until_end()
        finally:
            self._timer.cancel()
            self._loop.remove_reader(self._init.fileno)
            if self._watching:
                self._loop.remove_reader(self._out.fd)
                self._loop.remove_reader(self._err.fd)
        return self._collect()

    def _send(self) -> None:
        request = self._request
        body = wire.exec_body(request.job)
        flags = wire.exec_flags(keep=request.keep, packages=request.packages)
        ours: list[int] = []
        try:
            stdin = self._null_fd
            if request.stdin:
                stdin = sealed(request.stdin)
                ours.append(stdin)
            fds: tuple[int, ...] = (stdin, self._out.write_fd, self._err.write_fd)
            if len(body) > MAX_MESSAGE_BYTES - HEADER.size:
                file = sealed(body)
                ours.append(file)
                fds, flags, body = (*fds, file), flags | Flag.EXEC_IN_FILE, b""
            op = Op.EXEC if request.job.python is None else Op.PYTHON
            self._number = self._init.send(op, body, fds, flags)
        finally:
            for descriptor in ours:
                os.close(descriptor)

    async def _until_end(self) -> None:
        cancelled: asyncio.CancelledError | None = None
        try:
            while self._exited is None and not self._trouble:
                try:
                    await self._wake
                except asyncio.CancelledError as error:
                    cancelled = error
                    self._wake = self._loop.create_future()
                    self._init.end_command()
            if cancelled is not None:
                raise cancelled
        finally:
            # It holds this frame, which holds all output so far; see `uninterrupted`.
            del cancelled

    def _on_reply(self) -> None:
        data = self._init.receive()
        if data is None:
            return
        if not data:
            self._init.dead = True
            self._give_up(self._init.trouble)
            return
        try:
            self._exited = wire.read_exited(data, self._number)
        except BadReply as error:
            self._init.kill()
            self._give_up(f"the box broke the protocol: {error}")
            return
        self._wake_up()

    def _give_up(self, trouble: str) -> None:
        self._trouble = trouble
        self._wake_up()

    def _wake_up(self) -> None:
        if not self._wake.done():
            self._wake.set_result(None)

    def _look(self) -> None:
        """Also the first time, when it begins to watch the pipes."""
        if not self._watching:
            self._watching = True
            self._loop.add_reader(self._out.fd, self._on_output, self._out)
            self._loop.add_reader(self._err.fd, self._on_output, self._err)
            if first_look_s := self._gauge.first_look_s:
                self._timer = self._loop.call_later(first_look_s, self._look)
                return
        if time.monotonic() > self._deadline_s:
            self._init.kill()
            self._give_up("the box did not answer in time")
            return
        cause, pause_s = self._gauge.over_limit(self._init)
        if cause is not None:
            self._end(cause)
        self._timer = self._loop.call_later(pause_s, self._look)

    def _on_output(self, stream: Stream) -> None:
        if not stream.pull(self._limit) and (stream.cut or stream.ended):
            self._loop.remove_reader(stream.fd)
            if stream.cut:
                self._end(Cause.OUTPUT)

    def _end(self, cause: Cause) -> None:
        if self._cause is None:
            self._cause = cause
            self._init.end_command()

    def _collect(self) -> ExecResult:
        stdout, stderr = self._out.drain(self._limit), self._err.drain(self._limit)
        exited = self._exited
        if exited is None:
            return self._collect_dead(stdout, stderr)
        totals = self._gauge.finish(exited.cpu_s, exited.max_rss_bytes)
        exit_code = exited.code if exited.ending is Ending.EXITED else None
        oom_kills, pids_refused = totals.oom_kills, totals.pids_refused
        cause = self._cause
        if exited.ending is Ending.TIMEOUT:
            cause = cause or Cause.WALL
        elif exited.ending is Ending.NOT_STARTED:
            if exited.code in _NO_FILE or exited.code in _NO_PROGRAM:
                exit_code = 127 if exited.code in _NO_FILE else 126
                name = _what_failed(self._request.job, exited.code)
                stderr = name + b": " + os.strerror(exited.code).encode() + b"\n"
                stderr = stderr[: self._limit]
            elif exited.code == errno.EAGAIN:
                exit_code, pids_refused = 126, 1
            elif exited.code == errno.ENOMEM:
                oom_kills = 1
            else:
                return infra_error(f"the command did not start: {os.strerror(exited.code)}")
        elif exited.ending is Ending.KILLED and cause is None:
            return infra_error("the command was ended from outside")
        ending = judge(
            Seen(
                cause=cause,
                exit_code=exit_code,
                signal=exited.code if exited.ending is Ending.SIGNALED else None,
                output_cut=self._out.cut or self._err.cut,
                oom_kills=oom_kills,
                pids_refused=pids_refused,
                disk_full=exit_code != 0 and self._disk_full(),
                cpu_used_up=cpu_used_up(totals.cpu_s, self._request.limits.cpu_s),
            )
        )
        return self._told(ending, exited.wall_s, totals, stdout, stderr)

    def _disk_full(self) -> bool:
        room = self._init.room()
        return room.f_bavail < _NEW_FILE_BLOCKS or room.f_favail == 0

    def _collect_dead(self, stdout: bytes, stderr: bytes) -> ExecResult:
        """Process 1 is gone. If the memory limit did that, it is the program's doing."""
        totals = self._gauge.finish(0.0, 0)
        if not totals.oom_kills:
            return infra_error(self._trouble)
        cut = self._out.cut or self._err.cut
        ending = judge(Seen(Cause.MEMORY, None, 9, cut, totals.oom_kills, 0, False))
        wall_s = self._request.limits.wall_s + GRACE_S + time.monotonic() - self._deadline_s
        return self._told(ending, wall_s, totals, stdout, stderr)

    def _told(
        self, verdict: Verdict, wall_s: float, totals: Totals, stdout: bytes, stderr: bytes
    ) -> ExecResult:
        return ExecResult(
            status=verdict.status,
            exit_code=verdict.exit_code,
            signal=verdict.signal,
            stdout=stdout,
            stderr=stderr,
            truncated=self._out.cut or self._err.cut,
            usage=Usage(
                wall_s=wall_s,
                cpu_s=totals.cpu_s,
                peak_memory_bytes=totals.peak_memory_bytes,
            ),
            message=verdict.message,
        )


def _what_failed(job: wire.Job, number: int) -> bytes:
    """The program, or the directory in which it was to start: both fail with these."""
    name = job.argv[0][:200]
    if number in (errno.ENOENT, errno.ENOTDIR, errno.EACCES) and job.cwd != WORK:
        name += f" in {job.cwd[:200]}"
    return os.fsencode(name)


def beyond_memory(error: OSError) -> ExecResult:
    """The result where a control group does not take limits because the box holds more already.

    Raises:
        UserError: it takes these limits from nobody.
        OSError: what else was wrong with the group.
    """
    if error.errno in (errno.EBUSY, errno.ENOMEM):
        return refused(ExecStatus.OOM, "the box already holds more than memory_bytes")
    if error.errno in (errno.EINVAL, errno.ERANGE):
        raise UserError(
            f"the kernel of this host refuses these limits: {error.strerror}.",
            fix="lower limits.num_pids, cpus or the rates of disks",
        ) from error
    raise error
