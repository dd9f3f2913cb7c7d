"""The first process of a box: runs one command at a time, and reads and writes files for the owner.

Everything else in its pid namespace is hostile. It cannot be traced (not dumpable), not signalled
(first process, another user), and what it is sent by the owner was checked by the owner.
"""

from __future__ import annotations

import errno
import os
import resource
import select
import signal
import socket
import stat
import struct
import time
from typing import Any, Sequence

from ..protocol import Ending, Flag, Op, PythonKind
from . import files, kernel
from .jobs import Job, Privileges, parse_job, start_job
from .python_job import Importing
from .users import Users
from .wire import Channel, Fields, Malformed, Message, close_all, read_all

_MAX_POLL_MS = 10**9
_KINDS = tuple(PythonKind)
_MAX_BODY_BYTES = 16 * 2**20
_JOB_FLAGS = Flag.EXEC_KEEP | Flag.EXEC_IN_FILE | Flag.EXEC_PACKAGES
_JOBS = (Op.EXEC, Op.PYTHON, Op.PUT, Op.GET)
_NUM_FDS = 3


class _Running:
    """The command that runs now."""

    def __init__(self, request: int, pid: int, job: Job, keep: bool, started_s: float) -> None:
        self.request = request
        self.pid = pid
        self.keep = keep
        self.started_s = started_s
        self.deadline_s = self.started_s + job.wall_us / 1e6 if job.wall_us else None
        self.ended_by: Ending | None = None
        self.status: int | None = None
        self.usage = _Usage()

    def remaining_ms(self) -> int | None:
        """Time until the limit, rounded up; no more than poll takes."""
        if self.deadline_s is None or self.ended_by is not None:
            return None
        left_ms = int((self.deadline_s - time.monotonic()) * 1000) + 1
        return min(max(0, left_ms), _MAX_POLL_MS)


class _Usage:
    """Sums over all that was reaped during a command."""

    def __init__(self) -> None:
        self.user_s = self.system_s = 0.0
        self.max_rss_bytes = 0

    def add(self, used: resource.struct_rusage) -> None:
        """Count one process."""
        self.user_s += used.ru_utime
        self.system_s += used.ru_stime
        self.max_rss_bytes = max(self.max_rss_bytes, used.ru_maxrss * 1024)


class Init:
    """Serves the owner over one channel until it closes."""

    def __init__(
        self,
        channel: Channel,
        users: Users,
        packages: Sequence[int],
        importing: Importing | None,
    ) -> None:
        self._channel = channel
        self._users = users
        self._packages = tuple(packages)
        self._importing = importing
        self._running: _Running | None = None

    def serve(self) -> int:
        """Exit status: 0 if the owner hung up, 1 if it broke the protocol."""
        woken, wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, _nothing)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        poll = select.poll()
        poll.register(self._channel, select.POLLIN)
        poll.register(woken, select.POLLIN)
        try:
            while True:
                running = self._running
                ready = poll.poll(None if running is None else running.remaining_ms())
                for descriptor, _ in ready:
                    if descriptor == woken:
                        _drain(woken)
                    elif not self._receive():
                        return 0
                self._reap()
                self._check_deadline()
        except Malformed:
            return 1
        except (BrokenPipeError, ConnectionResetError):
            return 0

    def _receive(self) -> bool:
        message = self._channel.receive()
        if message is None:
            return False
        try:
            self._handle(message)
        finally:
            close_all(message.fds)
        return True

    def _handle(self, message: Message) -> None:
        is_job = message.op in _JOBS
        if message.flags & ~(_JOB_FLAGS if is_job else 0):
            raise Malformed(f"flags {message.flags}")
        if message.op == Op.KILL:
            self._kill(message)
            return
        if not is_job and message.op != Op.LISTEN:
            raise Malformed(f"op {message.op} is not for an init")
        in_file = bool(message.flags & Flag.EXEC_IN_FILE)
        if len(message.fds) != (_NUM_FDS + in_file if is_job else 0):
            raise Malformed(f"{len(message.fds)} descriptors")
        if self._running is not None and is_job:
            self._channel.send_error(message.id, errno.EBUSY, "a command is running")
            return
        try:
            if is_job:
                self._exec(message)
            else:
                self._listen(message)
        except OSError as error:
            self._channel.send_error(message.id, error.errno or errno.EIO, str(error))

    def _exec(self, message: Message) -> None:
        body = message.body
        if message.flags & Flag.EXEC_IN_FILE:
            if body or os.fstat(message.fds[3]).st_size > _MAX_BODY_BYTES:
                raise Malformed("a body beside a body in a file")
            body = read_all(message.fds[3])
        if message.op == Op.PYTHON and self._importing is None:
            raise OSError(errno.ENOSYS, "not a box of a template")
        job = parse_job(body, message.op)
        if (
            not self._may_be(job.uid, job.gid)
            or (message.flags & Flag.EXEC_PACKAGES and not self._packages)
            or (message.op != Op.PYTHON and not job.argv)
            or (job.python is not None and job.python.kind not in _KINDS)
        ):
            self._refuse(message.id, errno.EINVAL)
            return
        _restore_root()
        if message.op in (Op.PUT, Op.GET):
            self._transfer(message, job)
            return
        privileges = Privileges(
            self._packages if message.flags & Flag.EXEC_PACKAGES else (), bool(self._packages)
        )
        started_s = time.monotonic()
        keep = bool(message.flags & Flag.EXEC_KEEP)
        try:
            pid, error = start_job(job, message.fds[:3], privileges, self._importing)
        except OSError as failure:
            # Processes that were kept may have left no room for another.
            if not keep:
                _kill_all()
                _reap_all(_Usage())
            self._refuse(message.id, failure.errno or errno.EIO)
            return
        self._running = _Running(message.id, pid, job, keep, started_s)
        if error:
            self._running.ended_by = Ending.NOT_STARTED
            self._running.status = error

    def _refuse(self, request: int, number: int) -> None:
        self._send_end(request, Ending.NOT_STARTED, number)

    def _send_end(self, request: int, ending: Ending, code: int) -> None:
        body = struct.pack("<IiQQQQ", ending, code, 0, 0, 0, 0)
        self._channel.send(Op.EXITED, request, body)

    def _may_be(self, *ids: int) -> bool:
        """Whether these are ids for jobs: not that of this process, unless there is no other."""
        users = self._users
        own = users.init if users.num_ids > 1 else -1
        return all(number < users.num_ids and number != own for number in ids)

    def _kill(self, message: Message) -> None:
        if message.body or message.fds:
            raise Malformed("KILL has no body")
        if self._running is not None and self._running.ended_by is None:
            self._running.ended_by = Ending.KILLED
            _kill_all()

    def _check_deadline(self) -> None:
        running = self._running
        if running is not None and running.remaining_ms() == 0:
            running.ended_by = Ending.TIMEOUT
            _kill_all()

    def _reap(self) -> None:
        """Collect all that ended; finish the command if its process is among them."""
        running = self._running
        while True:
            try:
                pid, status, used = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            if running is not None:
                running.usage.add(used)
                if pid == running.pid:
                    self._finish(running, status)

    def _finish(self, running: _Running, status: int) -> None:
        wall_us = int((time.monotonic() - running.started_s) * 1e6)
        if not running.keep or running.ended_by in (Ending.TIMEOUT, Ending.KILLED):
            _kill_all()
            _reap_all(running.usage)
        ending, code = running.ended_by, 0
        if ending is Ending.NOT_STARTED:
            code = running.status or 0
        elif ending is None and os.WIFSIGNALED(status):
            ending, code = Ending.SIGNALED, os.WTERMSIG(status)
        elif ending is None:
            ending, code = Ending.EXITED, os.WEXITSTATUS(status)
        usage = running.usage
        numbers = (wall_us, int(usage.user_s * 1e6), int(usage.system_s * 1e6))
        body = struct.pack("<IiQQQQ", ending, code, *numbers, usage.max_rss_bytes)
        self._running = None
        self._channel.send(Op.EXITED, running.request, body)

    def _transfer(self, message: Message, job: Job) -> None:
        source, target, _ = message.fds[:_NUM_FDS]
        path = os.fsdecode(job.argv[0])
        try:
            with _As(job.uid, job.gid):
                if message.op == Op.PUT:
                    files.put(path, source, job.detail & 0o777)
                else:
                    files.get(path, target, job.detail)
            ending, code = Ending.EXITED, 0
        except OSError as error:
            ending, code = Ending.NOT_STARTED, error.errno or errno.EIO
        if not message.flags & Flag.EXEC_KEEP:
            _kill_all()
            _reap_all(_Usage())
        self._send_end(message.id, ending, code)

    def _listen(self, message: Message) -> None:
        fields = Fields(message.body)
        port = fields.u16()
        fields.end()
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(("127.0.0.1", port))
            listener.listen(64)
            self._channel.send(Op.DONE, message.id, fds=[listener.fileno()])


class _As:
    """Acts on files as a user of the box; saved and real ids stay, so nobody else can act on us."""

    def __init__(self, uid: int, gid: int) -> None:
        self._ids = (uid, gid)
        self._own = (os.geteuid(), os.getegid())

    def __enter__(self) -> None:
        os.setresgid(-1, self._ids[1], -1)
        os.setresuid(-1, self._ids[0], -1)

    def __exit__(self, *exception: object) -> None:
        os.setresuid(-1, self._own[0], -1)
        os.setresgid(-1, self._own[1], -1)
        # Changes of user cleared it.
        kernel.die_with_parent()


def _restore_root() -> None:
    """What a program did to `/` itself is in no layer, so no snapshot has it: it ends here."""
    found = os.stat("/")
    if (stat.S_IMODE(found.st_mode), found.st_uid, found.st_gid) == (0o755, 0, 0):
        return
    with _As(0, 0):
        os.chown("/", 0, 0)
        os.chmod("/", 0o755)


def _nothing(number: int, frame: Any) -> None:
    """A handler must exist for the wake-up to be written."""


def _drain(descriptor: int) -> None:
    try:
        while os.read(descriptor, 4096):
            pass
    except BlockingIOError:
        return


def _kill_all() -> None:
    """All processes of this box. Anywhere but in process 1 of one, they would be the host's."""
    assert os.getpid() == 1
    try:
        os.kill(-1, signal.SIGKILL)
    except ProcessLookupError:
        return


def _reap_all(usage: _Usage) -> None:
    while True:
        try:
            usage.add(os.wait4(-1, 0)[2])
        except ChildProcessError:
            return
