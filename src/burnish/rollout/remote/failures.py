"""What can go wrong between an engine's client and its servers."""

from enum import StrEnum

from burnish.core.errors import ClassifiedFailure, UserError
from burnish.core.records import Failure
from burnish.core.vocabulary import FailureKind


class RemoteProblem(StrEnum):
    """Why a server did not answer as it should."""

    UNREACHABLE = "unreachable"
    """No connection could be made: nothing was sent."""
    TIMEOUT = "timeout"
    """It was silent for too long."""
    LOST = "lost"
    """The connection broke before the answer was complete."""
    OVERLOADED = "overloaded"
    """It turned the request away for now (429, 503)."""
    BROKEN = "broken"
    """It failed inside (5xx), or ended the request with an error."""
    MALFORMED = "malformed"
    """What it sent does not follow its own interface."""
    OUTDATED = "outdated"
    """It serves other weights than it was sent: restarted, or changed by somebody else."""
    NOT_DELIVERED = "not_delivered"
    """It took an update, and serves the old weights all the same."""
    DISAGREE = "disagree"
    """Replicas with the same weights answer differently."""
    NOBODY = "nobody"
    """No replica can take the request."""
    CLOSED = "closed"
    """The client was closed."""


MOVABLE = frozenset(
    {
        RemoteProblem.UNREACHABLE,
        RemoteProblem.TIMEOUT,
        RemoteProblem.LOST,
        RemoteProblem.OVERLOADED,
        RemoteProblem.BROKEN,
        RemoteProblem.OUTDATED,
    }
)
"""After these another replica may go on with a request."""

FATAL = MOVABLE - {RemoteProblem.OVERLOADED}
"""After these a replica is left alone until it proves to be well again."""


class RemoteFailure(ClassifiedFailure):
    """Of kind `infra`: says nothing about the policy or a task."""

    def __init__(self, problem: RemoteProblem, url: str, message: str) -> None:
        """Name the server."""
        self.problem = problem
        """What exactly."""
        self.url = url
        """Of the server."""
        text = " ".join(f"{url}: {message} ({problem})".split())
        failure = Failure(kind=FailureKind.INFRA, where="rollout.remote", message=text)
        super().__init__(failure)


def refused(url: str, status: int, message: str) -> Exception:
    """What stands for an HTTP status that is not 200."""
    said = " ".join(message.split())[:300] or "no reason given"
    match status:
        case 401 | 403:
            return UserError(
                f"{url} refuses access (HTTP {status}): {said}.",
                fix="set engine.remote.token_env or token_file, or allow it on the server.",
            )
        case 404 | 405 | 501:
            return UserError(
                f"{url} does not know this endpoint (HTTP {status}): {said}.",
                fix="check engine.backend, the URL, and how the server was started "
                "(docs/engine.md).",
            )
        case 400 | 413 | 422:
            return UserError(
                f"{url} refuses the request (HTTP {status}): {said}.",
                fix="change the request as it says.",
            )
        case 429 | 503:
            return RemoteFailure(RemoteProblem.OVERLOADED, url, f"HTTP {status}: {said}")
        case _ if status >= 500:
            return RemoteFailure(RemoteProblem.BROKEN, url, f"HTTP {status}: {said}")
        case _:
            return RemoteFailure(RemoteProblem.MALFORMED, url, f"HTTP {status}: {said}")
