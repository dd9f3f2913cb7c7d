"""Errors: what a user did wrong, and failures classified once, at a boundary."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from burnish.core.records import Failure
from burnish.core.vocabulary import FailureKind


class UserError(ValueError):
    """Something the user can fix. Printed as one line without a traceback; exit status 2.

    Args:
        what: what was found, naming the file, key or value.
        fix: the command, key or value that puts it right.
    """

    def __init__(self, what: str, *, fix: str) -> None:
        """Join both into one line."""
        self.what = what
        self.fix = fix
        super().__init__(f"{what} Fix: {fix}")


class ClassifiedFailure(Exception):
    """An exception that already knows who is to blame."""

    def __init__(self, failure: Failure) -> None:
        """Wrap a failure record."""
        self.failure = failure
        super().__init__(f"[{failure.kind}] {failure.where}: {failure.message}")


class FileTooLargeError(OSError):
    """A file has more bytes than its reader would take; none of them was given."""

    def __init__(self, message: str, size_bytes: int) -> None:
        """Of a file of this size; see `too_large` for what the message says."""
        super().__init__(errno.EFBIG, message)
        self.message = message
        self.size_bytes = size_bytes

    def __str__(self) -> str:
        """Without the number of an error."""
        return self.message

    @classmethod
    def too_large(cls, path: str, size_bytes: int, limit_bytes: int) -> "FileTooLargeError":
        """Name the file, its size and how to get more of it."""
        name = path.encode("utf-8", "backslashreplace").decode()
        return cls(
            f"{name} has {size_bytes} bytes, more than limit_bytes = {limit_bytes}: raise that, "
            "or cut the file in the box, as with `head -c`",
            size_bytes,
        )


@contextmanager
def boundary(kind: FailureKind, where: str) -> Iterator[None]:
    """Translate whatever extension code raises into a ClassifiedFailure.

    Failures that are already classified, mistakes that only the user can mend, and cancellation
    pass unchanged. A MemoryError or a full disk is the machine's fault, whoever happened to hit it.
    """
    try:
        yield
    except (ClassifiedFailure, UserError):
        raise
    except (MemoryError, OSError) as error:
        blamed = (
            FailureKind.INFRA
            if isinstance(error, MemoryError) or error.errno in _MACHINE_ERRNOS
            else kind
        )
        raise ClassifiedFailure(
            Failure(kind=blamed, where=where, message=one_line(error))
        ) from error
    except Exception as error:
        raise ClassifiedFailure(Failure(kind=kind, where=where, message=one_line(error))) from error


def one_line(error: BaseException, limit: int = 300) -> str:
    """`Type: message` with line breaks folded, at most `limit` characters."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= limit else text[: limit - 3] + "..."


# ENOSPC, ENOMEM, EMFILE, ENFILE, EDQUOT: resources of the host.
_MACHINE_ERRNOS = frozenset({28, 12, 24, 23, 122})
