"""The server behind `burnish sandbox`: one per user, started when it is needed.

It listens on a Unix socket in a directory that only its user may enter, holds boxes from one
command to the next, and ends by itself after a while without boxes. `python -m` runs it.
"""

import asyncio
import fcntl
import logging
import os
import select
import signal
import socket
import stat
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import msgspec

from burnish.core.errors import ClassifiedFailure, UserError
from burnish.core.records import Failure, Record
from burnish.core.vocabulary import FailureKind
from burnish.sandbox.proctree import open_process

_MODULE = "burnish.sandbox.remote.daemon"
SOCKET = "sandbox.sock"
_LOG_FILE = "sandbox.log"
_MAX_LOG_BYTES = 2**20
_MAX_BOXES = 64
_IDLE_EXIT_S = 600.0
_START_S = 60.0
_STOP_S = 60.0
_CONNECT_S = 10.0
"""For a daemon that accepts nobody, once as many wait for it as the kernel lets wait."""
_LOG = logging.getLogger(__name__)


class _Started(Record, frozen=True, kw_only=True):
    """What a daemon says at its start, through a pipe."""

    what: str = ""
    """Why it did not start; empty if it did."""
    fix: str = ""
    """For a mistake of the user: what to do."""


def runtime_folder() -> Path:
    """Where this user's daemon lives; made if it is missing.

    Raises:
        UserError: it is somebody else's, or others can enter it.
    """
    base = os.environ.get("XDG_RUNTIME_DIR")
    folder = Path(base, "burnish") if base else Path(f"/tmp/burnish-{os.getuid()}")
    fix = f"remove {folder}, or set XDG_RUNTIME_DIR to a directory of yours"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        raise UserError(f"{folder} cannot be used: {error.strerror}.", fix=fix) from error
    # Below /tmp anybody may have made it first.
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise UserError(f"{folder} is not a directory of yours alone.", fix=fix)
    return folder


def audit_folder() -> Path:
    """Where the logs of its boxes are."""
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(base, "burnish", "sandbox-audit")


def running_url() -> str | None:
    """The URL of the daemon; None if none runs.

    Raises:
        UserError: it is stopped, and would never answer.
    """
    pid = _peer()
    if pid is None:
        return None
    _require_running(pid)
    return _url()


def log_file() -> Path:
    """What it wrote."""
    return runtime_folder() / _LOG_FILE


def ensure_running() -> str:
    """The URL of the daemon, which is started if there is none.

    Raises:
        UserError: boxes cannot run here, or it is stopped; says what to do.
        ClassifiedFailure: it did not start.
    """
    with _lock():
        pid = _peer()
        if pid is None:
            _start()
        else:
            _require_running(pid)
    return _url()


def stop() -> bool:
    """End the daemon and all its boxes; False if none ran. Returns when it has ended.

    Raises:
        UserError: it is stopped, and would not end.
        ClassifiedFailure: it does not end.
    """
    with _lock():
        pid = _peer()
        if pid is None:
            return False
        _require_running(pid)
        process = open_process(pid)
        if process is None:
            return True
        try:
            signal.pidfd_send_signal(process, signal.SIGTERM)
            if not select.select((process,), (), (), _STOP_S)[0]:
                raise _failure(f"it does not end (process {pid}); {log_file()} may say why")
        except ProcessLookupError:
            return True
        finally:
            os.close(process)
        return True


def has_died() -> bool:
    """Whether the last daemon was killed: one that ends takes its socket with it."""
    # Under the lock for the same reason as below.
    with _lock():
        return (runtime_folder() / SOCKET).is_socket() and _peer() is None


def remove_dead_socket() -> Path | None:
    """What a killed daemon left; None if there is nothing of that kind."""
    path = runtime_folder() / SOCKET
    # Under the lock, as a daemon that starts has a socket for a moment at which nobody listens.
    with _lock():
        if not path.is_socket() or _peer() is not None:
            return None
        path.unlink()
        return path


def main(socket_path: str, ready_fd: str) -> None:
    """Run a daemon.

    Args:
        socket_path: where it listens.
        ready_fd: descriptor to which it writes how its start went.
    """
    os.umask(0o077)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    path = Path(socket_path)

    def tell(message: _Started) -> None:
        with open(int(ready_fd), "wb") as pipe:
            pipe.write(msgspec.json.encode(message))

    try:
        asyncio.run(_serve(path, tell))
    except UserError as error:
        tell(_Started(what=error.what, fix=error.fix))
    except ClassifiedFailure as error:
        tell(_Started(what=str(error)))
    _LOG.info("ended")


async def _serve(path: Path, tell: Callable[[_Started], None]) -> None:
    # Not at the top: verbs that only ask for the address start twice as fast without these.
    from burnish.sandbox.config import SandboxConfig
    from burnish.sandbox.remote.config import ServeConfig
    from burnish.sandbox.remote.serving import serve
    from burnish.sandbox.start import open_pool

    def ready(url: str) -> None:
        _LOG.info("process %d listens at %s", os.getpid(), url)
        tell(_Started())

    pool = open_pool(SandboxConfig(max_boxes=_MAX_BOXES, audit=audit_folder()))
    config = ServeConfig(
        socket=path, allow_detached=True, idle_exit_s=_IDLE_EXIT_S, hang_up_ends=True
    )
    await serve(
        pool,
        config,
        max_boxes=_MAX_BOXES,
        ready=ready,
        before_idle_exit=lambda: _leave(path),
    )


def _leave(path: Path) -> bool:
    """Take the address away unless somebody is about to use it."""
    try:
        with _lock(wait=False):
            path.unlink(missing_ok=True)
    except BlockingIOError:
        return False
    _LOG.info("no boxes for %g s", _IDLE_EXIT_S)
    return True


def _url() -> str:
    return f"http+unix://{runtime_folder() / SOCKET}"


def _peer() -> int | None:
    """Process id of the daemon, as the kernel knows it; None if nobody listens.

    Raises:
        UserError: somebody does, but lets nobody in.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        # A timeout of Python's would make it fail at once.
        limit = struct.pack("ll", *(int(part) for part in divmod(_CONNECT_S * 1e6, 1e6)))
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        try:
            probe.connect(str(runtime_folder() / SOCKET))
        except BlockingIOError as error:
            raise UserError(
                "the daemon of sandboxes does not answer.",
                fix=f"{log_file()} names its process: kill -CONT it; or kill -KILL it, which ends "
                "its boxes",
            ) from error
        except OSError:
            return None
        size = struct.calcsize("3i")
        pid, uid, _ = struct.unpack(
            "3i", probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
        )
        return int(pid) if uid == os.getuid() else None


def _require_running(pid: int) -> None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return  # it ends just now
    # The name in parentheses may hold anything.
    if stat.rpartition(")")[2].split()[0] in ("T", "t"):
        raise UserError(
            f"the daemon of sandboxes (process {pid}) is stopped and does not answer.",
            fix=f"kill -CONT {pid}; or kill -KILL {pid}, which ends its boxes",
        )


@contextmanager
def _lock(*, wait: bool = True) -> Iterator[None]:
    """Nobody else starts or stops the daemon of this user meanwhile.

    Raises:
        BlockingIOError: somebody does, and we do not wait.
    """
    folder = os.open(runtime_folder(), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        yield
    finally:
        os.close(folder)


def _start() -> None:
    path = runtime_folder() / SOCKET
    reading, writing = os.pipe2(os.O_CLOEXEC)
    with _open_log() as log:
        process = subprocess.Popen(
            [sys.executable, "-m", _MODULE, str(path), str(writing)],
            pass_fds=(writing,),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd="/",
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(map(os.path.abspath, filter(None, sys.path))),
            },
            start_new_session=True,
        )
    os.close(writing)
    try:
        data = b""
        if select.select((reading,), (), (), _START_S)[0]:
            data = os.read(reading, select.PIPE_BUF)
    finally:
        os.close(reading)
    if not data:
        process.kill()
        code = process.wait()
        raise _failure(f"it ended with status {code} before its first word; see {log_file()}")
    started = msgspec.json.decode(data, type=_Started)
    if started.fix:
        raise UserError(started.what, fix=started.fix)
    if started.what:
        raise _failure(started.what)
    # It is not ours any more: it outlives us, and init reaps it.
    process.returncode = 0


def _open_log() -> BinaryIO:
    path = log_file()
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o600)
    if os.fstat(descriptor).st_size > _MAX_LOG_BYTES:
        os.ftruncate(descriptor, 0)
    return open(descriptor, "ab")


def _failure(message: str) -> ClassifiedFailure:
    return ClassifiedFailure(
        Failure(kind=FailureKind.SANDBOX, where="sandbox.daemon", message=message)
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
