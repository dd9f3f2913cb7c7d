"""Commands: what EXEC and its like ask for, and the process that becomes it.

A job costs one `os.fork` of a small interpreter (0.3 ms), where the C helper's costs a vfork.
"""

from __future__ import annotations

import errno
import os
import resource
import select
import signal
from typing import NamedTuple, NoReturn, Sequence

from ..protocol import Op
from . import kernel
from .python_job import Importing, PythonJob, run_python
from .wire import Fields, Malformed

_NO_LIMIT = 2**64 - 1
_START_LIMIT_S = 2.0


class Limit(NamedTuple):
    """One `setrlimit`."""

    resource: int
    soft: int
    hard: int


class Privileges(NamedTuple):
    """What a job may do as root of the box."""

    capabilities: tuple[int, ...]
    bounded_late: bool
    """The init's bounding set is not empty, as other jobs have capabilities."""


class Job(NamedTuple):
    """See EXEC, PUT, GET and PYTHON in `protocol`."""

    wall_us: int
    detail: int
    uid: int
    gid: int
    limits: list[Limit]
    cwd: bytes
    files: list[bytes]
    argv: list[bytes]
    env: dict[bytes, bytes]
    python: PythonJob | None = None


def parse_job(body: bytes, op: int) -> Job:
    """Take the body of a message apart.

    Raises:
        Malformed: it is wrong.
    """
    fields = Fields(body)
    wall_us, detail, uid, gid = fields.u64(), fields.u64(), fields.u32(), fields.u32()
    counts = [fields.u32() for _ in range(4)]
    limits = fields.many(lambda: Limit(fields.u32(), fields.u64(), fields.u64()), counts[0])
    cwd = fields.text()
    files, argv, variables = (fields.many(fields.text, count) for count in counts[1:])
    fields.end()
    env = {}
    for variable in variables:
        name, _, value = variable.partition(b"=")
        if name:
            env[name] = value
    job = Job(wall_us, detail, uid, gid, limits, cwd, files, argv, env)
    if op != Op.PYTHON:
        return job
    if len(files) != 1:
        raise Malformed("PYTHON has one source")
    return job._replace(python=PythonJob(detail & 0xFFFFFFFF, detail >> 32, files[0]))


def start_job(
    job: Job, fds: Sequence[int], privileges: Privileges, importing: Importing | None
) -> tuple[int, int]:
    """Fork and become the program. Returns the pid, and the errno of what failed before it ran."""
    report, reported = os.pipe2(os.O_CLOEXEC)
    pid = os.fork()
    if pid == 0:
        _become(job, fds, privileges, importing, reported)
    os.close(reported)
    try:
        # A process that was kept can stop the new one as soon as they have one user.
        if not select.select([report], [], [], _START_LIMIT_S)[0]:
            os.kill(pid, signal.SIGKILL)
        answer = os.read(report, 4)
    finally:
        os.close(report)
    return pid, int.from_bytes(answer, "little")


def _become(
    job: Job,
    fds: Sequence[int],
    privileges: Privileges,
    importing: Importing | None,
    reported: int,
) -> NoReturn:
    try:
        try:
            _prepare(job, fds, privileges)
            if job.python is None:
                _execute(job)
            os.close(reported)
        except OSError as error:
            os.write(reported, (error.errno or errno.EIO).to_bytes(4, "little"))
        except (ValueError, OverflowError):
            os.write(reported, errno.EINVAL.to_bytes(4, "little"))
        else:
            assert job.python is not None
            assert importing is not None
            run_python(job.python, job.argv, job.env, importing)
    finally:
        # Whatever a program throws, its process must never go on with the init's code.
        os._exit(127)


def _prepare(job: Job, fds: Sequence[int], privileges: Privileges) -> None:
    os.setsid()
    for target, source in enumerate(fds):
        os.dup2(source, target)
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    for limit in job.limits:
        _set_limit(limit)
    if privileges.bounded_late and not privileges.capabilities:
        kernel.bound_capabilities(())
    if os.getuid() != job.uid:
        os.setgroups([])
        os.setresgid(job.gid, job.gid, job.gid)
        os.setresuid(job.uid, job.uid, job.uid)
        # Where fs.suid_dumpable is 1 this has opened our memory to the processes of that user, as
        # soon as we have no more capabilities than they.
        kernel.set_dumpable(False)
    special = privileges.bounded_late
    kernel.set_secure_bits(fixed=False, root_is_special=special)
    kernel.set_capabilities(privileges.capabilities)
    os.chdir(job.cwd)


def _set_limit(limit: Limit) -> None:
    """The host's own hard limit stays where it is lower."""
    _, ceiling = resource.getrlimit(limit.resource)
    wanted = [resource.RLIM_INFINITY if n == _NO_LIMIT else n for n in (limit.soft, limit.hard)]
    bounded = [
        value
        if ceiling == resource.RLIM_INFINITY
        else ceiling
        if value == resource.RLIM_INFINITY
        else min(value, ceiling)
        for value in wanted
    ]
    resource.setrlimit(limit.resource, (bounded[0], bounded[1]))


def _execute(job: Job) -> None:
    """The first file that there is. Raises what kept it from running."""
    denied = None
    for file in job.files:
        try:
            os.execve(file, job.argv, job.env)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except PermissionError as error:
            denied = error
    raise denied or FileNotFoundError(errno.ENOENT, "no such program")
