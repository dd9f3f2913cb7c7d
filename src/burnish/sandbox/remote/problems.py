"""One table between exceptions and what stands for them on the wire."""

import errno
import os

from burnish.core.errors import ClassifiedFailure, FileTooLargeError, UserError, one_line
from burnish.core.records import Failure
from burnish.core.vocabulary import FailureKind
from burnish.sandbox.remote.messages import Malformed, Problem, ProblemKind

_STATUS = {
    ProblemKind.USER: 422,
    ProblemKind.VALUE: 400,
    ProblemKind.OS: 409,
    ProblemKind.FAILURE: 502,
    ProblemKind.NO_BOX: 404,
    ProblemKind.NO_REQUEST: 404,
    ProblemKind.BUSY: 503,
    ProblemKind.TOO_LARGE: 413,
    ProblemKind.UNAUTHORIZED: 401,
    ProblemKind.MALFORMED: 400,
    ProblemKind.VERSION: 404,
    ProblemKind.INTERNAL: 500,
}


class Refused(Exception):
    """A server's own no: it has its problem ready."""

    def __init__(self, kind: ProblemKind, message: str, *, fix: str = "") -> None:
        """Wrap a problem."""
        self.problem = Problem(kind=kind, message=message, fix=fix)
        super().__init__(message)


class RemoteFailure(ClassifiedFailure):
    """The remote side, or the way to it, is broken: says nothing about any program."""

    def __init__(self, kind: ProblemKind, host: str, message: str) -> None:
        """A failure of kind `sandbox` that names the host."""
        self.kind = kind
        """What exactly."""
        self.host = host
        """URL of the server."""
        failure = Failure(
            kind=FailureKind.SANDBOX,
            where="sandbox.remote",
            message=f"{host}: {' '.join(message.split())}",
        )
        super().__init__(failure)


EXPECTED = (UserError, ClassifiedFailure, ValueError, OSError, Malformed, Refused)
"""What work in a box may raise; anything else is a bug of the server."""


def http_status(problem: Problem) -> int:
    """For people with a log of HTTP; clients read the problem itself."""
    return _STATUS.get(problem.kind, 500)


def problem_of(error: BaseException) -> Problem:
    """What to send for an exception."""
    match error:
        case Refused():
            return error.problem
        case UserError():
            return Problem(kind=ProblemKind.USER, message=error.what, fix=error.fix)
        case ClassifiedFailure():
            failure = error.failure
            return Problem(kind=ProblemKind.FAILURE, message=failure.message, failure=failure)
        case Malformed():
            return Problem(kind=ProblemKind.MALFORMED, message=one_line(error))
        case ValueError():
            return Problem(kind=ProblemKind.VALUE, message=str(error))
        case FileTooLargeError():
            return Problem(
                kind=ProblemKind.OS,
                message=error.message,
                errno=errno.EFBIG,
                size_bytes=error.size_bytes,
            )
        case OSError():
            return Problem(
                kind=ProblemKind.OS,
                message=error.strerror or str(error) or type(error).__name__,
                errno=error.errno or _errno_of(error),
            )
        case _:
            return Problem(kind=ProblemKind.INTERNAL, message=one_line(error))


def exception_of(problem: Problem, host: str) -> Exception:
    """What a client raises for what it was sent."""
    match problem.kind:
        case ProblemKind.USER:
            return UserError(problem.message, fix=problem.fix or "see `burnish doctor` there")
        case ProblemKind.VALUE | ProblemKind.TOO_LARGE:
            return ValueError(problem.message)
        case ProblemKind.OS if problem.size_bytes:
            return FileTooLargeError(problem.message, problem.size_bytes)
        case ProblemKind.OS:
            return OSError(problem.errno, problem.message or os.strerror(problem.errno))
        case ProblemKind.UNAUTHORIZED:
            return UserError(
                f"{host} refuses the token.", fix="give the token that its --token-file holds"
            )
        case ProblemKind.VERSION:
            return UserError(
                f"{host}: {problem.message}", fix="install the same Burnish on both sides"
            )
        case ProblemKind.FAILURE if problem.failure is not None:
            failure = problem.failure
            return ClassifiedFailure(
                Failure(
                    kind=failure.kind,
                    where=failure.where,
                    message=f"{failure.message} (on {host})",
                )
            )
        case _:
            return RemoteFailure(problem.kind, host, problem.message)


def _errno_of(error: OSError) -> int:
    if isinstance(error, FileNotFoundError):
        return errno.ENOENT
    return errno.ETIMEDOUT if isinstance(error, TimeoutError) else errno.EIO
