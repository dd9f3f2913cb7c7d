"""The same work inside a user namespace, for owners that are not root.

An ordinary user can neither give files to the other ids of a box nor read what a box closed to all.
In the user namespace of the helper, which that user owns, both are possible; and owners there are
those of the box, without a shift (seen from outside, 0 is the user and 1 the first subordinate id).
Entering takes a process with a single thread, so each call starts one:

    NamespaceWorker --JSON on stdin, descriptors--> python -m burnish.sandbox.state.worker
                    <--JSON on stdout--------------   setns, setresuid(0), then the function itself
"""

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path

import msgspec

from burnish.core.errors import ClassifiedFailure, UserError
from burnish.core.records import Failure, Record
from burnish.core.vocabulary import FailureKind
from burnish.sandbox.archive.stop import Stop
from burnish.sandbox.state.export import digest, export_layers
from burnish.sandbox.state.imports import import_tar
from burnish.sandbox.state.squash import squash

_CLONE_NEWUSER = 0x10000000
_LOOK_S = 0.1
"""So often we look whether the work shall end early."""


class _Verb(StrEnum):
    EXPORT = "export"
    IMPORT = "import"
    SQUASH = "squash"
    DIGEST = "digest"


class _Request(Record, frozen=True, kw_only=True):
    verb: _Verb
    namespace_fd: int
    layer_fds: tuple[int, ...] = ()
    into_fd: int = -1
    path: bytes = b""
    below: bytes = b""
    covered: tuple[str, ...] = ()


class _Reply(Record, frozen=True, kw_only=True):
    digest: str = ""
    errno: int = 0
    what: str = ""
    fix: str = ""
    is_value_error: bool = False


class NamespaceWorker:
    """The functions of this package in a user namespace. Each call blocks: use a thread.

    Errors are those of the functions; a worker that dies is a ClassifiedFailure of kind sandbox.
    """

    def __init__(self, namespace_fd: int) -> None:
        """Work in this namespace.

        Args:
            namespace_fd: of `/proc/<helper>/ns/user`; belongs to the caller.
        """
        self._namespace_fd = namespace_fd

    def export_layers(
        self, layer_fds: Sequence[int], destination: Path, stop: Stop | None = None
    ) -> str:
        """See `export.export_layers`."""
        return self._call(_Verb.EXPORT, layer_fds, path=destination, stop=stop).digest

    def digest(self, layer_fds: Sequence[int]) -> str:
        """See `export.digest`."""
        return self._call(_Verb.DIGEST, layer_fds).digest

    def import_tar(
        self,
        source: Path,
        into_fd: int,
        below: Path | None = None,
        covered: Sequence[str] = (),
        stop: Stop | None = None,
    ) -> None:
        """See `imports.import_tar`."""
        self._call(_Verb.IMPORT, (), into_fd, source, below, tuple(covered), stop)

    def squash(self, layer_fds: Sequence[int], into_fd: int, stop: Stop | None = None) -> None:
        """See `squash.squash`."""
        self._call(_Verb.SQUASH, layer_fds, into_fd, stop=stop)

    def _call(
        self,
        verb: _Verb,
        layer_fds: Sequence[int],
        into_fd: int = -1,
        path: Path | None = None,
        below: Path | None = None,
        covered: tuple[str, ...] = (),
        stop: Stop | None = None,
    ) -> _Reply:
        request = _Request(
            verb=verb,
            namespace_fd=self._namespace_fd,
            layer_fds=tuple(layer_fds),
            into_fd=into_fd,
            path=b"" if path is None else bytes(path.absolute()),
            below=b"" if below is None else bytes(below),
            covered=covered,
        )
        passed = [self._namespace_fd, *layer_fds, *([into_fd] if into_fd >= 0 else [])]
        return _raise_again(_run(msgspec.json.encode(request), passed, stop or Stop()))


def _run(request: bytes, passed: list[int], stop: Stop) -> _Reply:
    command = [sys.executable, "-m", __name__]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, stdin=pipe, stdout=pipe, stderr=pipe, pass_fds=passed
    ) as process:
        out, error = _communicate(process, request, stop)
    stop.check()
    if process.returncode:
        last = error.decode("utf-8", "replace").strip().splitlines()[-1:]
        raise _died(f"exit status {process.returncode}: {''.join(last)[:300]}")
    return msgspec.json.decode(out, type=_Reply)


def _communicate(
    process: subprocess.Popen[bytes], request: bytes, stop: Stop
) -> tuple[bytes, bytes]:
    unsent: bytes | None = request
    while True:
        try:
            return process.communicate(unsent, timeout=_LOOK_S)
        except subprocess.TimeoutExpired:
            unsent = None
            if stop.is_set:
                # It removes what it has half written.
                process.terminate()
                return process.communicate()


def _raise_again(reply: _Reply) -> _Reply:
    if reply.fix:
        raise UserError(reply.what, fix=reply.fix)
    if reply.is_value_error:
        raise ValueError(reply.what)
    if reply.errno:
        raise OSError(reply.errno, reply.what)
    return reply


def _died(message: str) -> ClassifiedFailure:
    failure = Failure(kind=FailureKind.SANDBOX, where="sandbox.state.worker", message=message)
    return ClassifiedFailure(failure)


def _enter(namespace_fd: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(namespace_fd, _CLONE_NEWUSER):
        code = ctypes.get_errno()
        raise OSError(code, f"entering the user namespace: {os.strerror(code)}")
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)


def _work(request: _Request) -> str:
    path = Path(os.fsdecode(request.path))
    if request.verb is _Verb.EXPORT:
        return export_layers(request.layer_fds, path, 0)
    if request.verb is _Verb.DIGEST:
        return digest(request.layer_fds, 0)
    if request.verb is _Verb.SQUASH:
        squash(request.layer_fds, request.into_fd)
    else:
        below = Path(os.fsdecode(request.below)) if request.below else None
        import_tar(path, request.into_fd, 0, below=below, covered=request.covered)
    return ""


def _answer(request: _Request) -> _Reply:
    try:
        _enter(request.namespace_fd)
        return _Reply(digest=_work(request))
    except UserError as error:
        return _Reply(what=error.what, fix=error.fix)
    except ValueError as error:
        return _Reply(what=str(error), is_value_error=True)
    except OSError as error:
        return _Reply(what=error.strerror or str(error), errno=error.errno or 5)


def _end(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


def _main() -> None:
    signal.signal(signal.SIGTERM, _end)
    request = msgspec.json.decode(sys.stdin.buffer.read(), type=_Request)
    sys.stdout.buffer.write(msgspec.json.encode(_answer(request)))


if __name__ == "__main__":
    _main()
