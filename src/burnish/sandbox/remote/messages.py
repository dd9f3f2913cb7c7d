"""What client and server of remote boxes say to each other: MessagePack bodies over HTTP.

    GET    /health                          -> Health           no token needed
    GET    /v4/pool                         -> PoolInfo
    GET    /v4/stats                        -> Stats
    GET    /v4/boxes                        -> Boxes
    POST   /v4/boxes                        CreateBox -> BoxInfo                 (job)
    POST   /v4/batches                      CreateBoxes -> Boxes                 (job)
    DELETE /v4/boxes/ID                     -> Done             also if it is gone
    POST   /v4/boxes/ID/exec                Exec -> ExecResult                   (job)
    POST   /v4/boxes/ID/write               WriteFile -> Done                    (job)
    POST   /v4/boxes/ID/read                ReadFile -> FileData                 (job)
    POST   /v4/boxes/ID/allow               SetAllow -> Done                     (job)
    POST   /v4/boxes/ID/snapshot            Done -> Snapshot                     (job)
    POST   /v4/boxes/ID/rollback            Rollback -> Done                     (job)
    POST   /v4/boxes/ID/forget              Forget -> Done                       (job)
    POST   /v4/boxes/ID/fork                Fork -> Boxes                        (job)
    POST   /v4/boxes/ID/export              Export -> Exported                   (job)
    POST   /v4/boxes/ID/import              Import -> Done                       (job)
    PUT    /v4/files                        bytes -> Uploaded   what `import` then names
    GET    /v4/files/ID                     -> bytes            what `export` made
    DELETE /v4/files/ID                     -> Done
    GET    /v4/requests/ID                  -> the answer of a job, or Pending
    DELETE /v4/requests/ID                  -> Done             ends the job
    POST   /v4/sessions/heartbeat           -> Stats            keeps the boxes of the session
    DELETE /v4/sessions                     -> Done             destroys them

A job carries an id of the client's in `Burnish-Request`; the session is in `Burnish-Session`.
Status 202 is `Pending`: ask again. Other failures are a `Problem`. GET answers are JSON for those
who accept nothing but that. Every answer names the version of this interface in `Burnish-Api`.
"""

from enum import StrEnum
from typing import TypeVar

import msgspec

from burnish.core.boxes import Capabilities, Limits, Policy
from burnish.core.records import Failure, Record

API_VERSION = 4
API_HEADER = "Burnish-Api"
REQUEST_HEADER = "Burnish-Request"
SESSION_HEADER = "Burnish-Session"
CONTENT_TYPE = "application/msgpack"

T = TypeVar("T")


class ProblemKind(StrEnum):
    """Why there is no answer. The client raises the matching exception."""

    USER = "user"
    """UserError: the user can fix it."""
    VALUE = "value"
    """ValueError: what was asked makes no sense."""
    OS = "os"
    """OSError, with its errno."""
    FAILURE = "failure"
    """ClassifiedFailure."""
    NO_BOX = "no_box"
    """There is no such box: destroyed, or its lease ran out."""
    NO_REQUEST = "no_request"
    """There is no such request: cancelled, too old, or the server is another one."""
    BUSY = "busy"
    """Too many are waiting already."""
    TOO_LARGE = "too_large"
    """The body is over the server's bound."""
    UNAUTHORIZED = "unauthorized"
    """No token, or a wrong one."""
    MALFORMED = "malformed"
    """Not a message of this interface."""
    VERSION = "version"
    """Another version of this interface."""
    INTERNAL = "internal"
    """A bug of the server."""
    UNREACHABLE = "unreachable"
    """No answer at all. Never sent: a client finds it."""


class Problem(Record, frozen=True, kw_only=True):
    """The answer when there is none."""

    kind: ProblemKind
    """What the client raises."""
    message: str
    """One line."""
    fix: str = ""
    """For `user`: what to do."""
    errno: int = 0
    """For `os`."""
    size_bytes: int = 0
    """For `os`, if a file is larger than it may be: how large."""
    failure: Failure | None = None
    """For `failure`."""


class Pending(Record, frozen=True, kw_only=True):
    """Not done yet: ask again."""


class Done(Record, frozen=True, kw_only=True):
    """Done; nothing to tell. Also the body of what needs no arguments."""


class Health(Record, frozen=True, kw_only=True):
    """A server is here."""

    api: int
    """Version of this interface."""


class CreateBox(Record, frozen=True, kw_only=True):
    """Ask for a box."""

    image: str | None = None
    """See `SandboxPool.acquire`."""
    policy: Policy = Policy()
    """What it may touch."""
    detached: bool = False
    """It lives until it is destroyed, whatever becomes of the client. Not every server allows."""


class CreateBoxes(Record, frozen=True, kw_only=True):
    """Ask for several alike: all, or none."""

    count: int
    """How many."""
    box: CreateBox
    """Each of them."""


class Exec(Record, frozen=True, kw_only=True):
    """Run a command; see `Sandbox.exec`."""

    argv: tuple[bytes, ...]
    """File names need not be UTF-8, here and below."""
    stdin: bytes = b""
    """What it reads."""
    limits: Limits = Limits()
    """Bounds."""
    env: dict[str, bytes] = msgspec.field(default_factory=dict)
    """Added variables."""
    cwd: bytes | None = None
    """Where it starts."""
    keep: bool = False
    """Leave alive what it started."""


class WriteFile(Record, frozen=True, kw_only=True):
    """Write below `/work`."""

    path: bytes
    """Relative."""
    data: bytes
    """Content."""


class ReadFile(Record, frozen=True, kw_only=True):
    """Read below `/work`."""

    path: bytes
    """Relative."""
    limit_bytes: int
    """It has no more bytes, or none are given."""


class FileData(Record, frozen=True, kw_only=True):
    """Content of a file."""

    data: bytes
    """All of it."""


class SetAllow(Record, frozen=True, kw_only=True):
    """Replace the allow-list; see `NetworkedSandbox.set_allow`."""

    allow: tuple[str, ...]
    """The new one."""


class Rollback(Record, frozen=True, kw_only=True):
    """Back to a snapshot."""

    snapshot: str
    """Id of a snapshot that this server made."""


class Forget(Record, frozen=True, kw_only=True):
    """Free a snapshot."""

    snapshot: str
    """Id; nothing happens if there is none of it."""


class Fork(Record, frozen=True, kw_only=True):
    """Boxes that start alike."""

    count: int
    """How many."""
    snapshot: str | None = None
    """Id; None: the present state."""


class Export(Record, frozen=True, kw_only=True):
    """Make a tar of what changed."""

    snapshot: str | None = None
    """Id; None: the present state."""


class Exported(Record, frozen=True, kw_only=True):
    """A tar that waits to be fetched."""

    digest: str
    """Of its content."""
    file: str
    """Id of the file on the server."""
    num_bytes: int
    """Its size."""


class Uploaded(Record, frozen=True, kw_only=True):
    """A file that lies on the server."""

    file: str
    """Its id."""


class Import(Record, frozen=True, kw_only=True):
    """Put an uploaded tar into a box."""

    file: str
    """Id from `Uploaded`; used up."""


class BoxInfo(Record, frozen=True, kw_only=True):
    """A box as others see it."""

    id: str
    """Unique on its server, and by its length anywhere."""
    local_id: str
    """Its id on the machine of the server, as in logs there."""
    image: str | None
    """What it was made from; None: the host's own programs."""
    policy: Policy
    """What it may touch."""
    detached: bool
    """Whether it outlives its client."""
    age_s: float
    """Since it was made."""
    num_commands: int
    """Started so far."""
    busy: bool
    """Whether something runs in it now."""
    lease_left_s: float | None
    """Until it is destroyed unless its client is heard of; None for detached boxes."""


class Boxes(Record, frozen=True, kw_only=True):
    """Several."""

    boxes: tuple[BoxInfo, ...]
    """In order of their making."""


class PoolInfo(Record, frozen=True, kw_only=True):
    """What a client must know of a server."""

    instance: str
    """Another one after each start: boxes and snapshots of the former are gone."""
    capabilities: Capabilities
    """Of the pool behind it."""
    max_boxes: int
    """At once."""
    lease_s: float
    """Without a sign of life for so long, a session loses its boxes."""
    max_request_bytes: int
    """Larger bodies are refused."""


class Stats(Record, frozen=True, kw_only=True):
    """How a server is doing."""

    instance: str
    """See `PoolInfo`."""
    backend: str
    """Kind of the boxes."""
    pid: int
    """Of the server."""
    uptime_s: float
    """Since its start."""
    max_boxes: int
    """Bound of the next."""
    num_boxes: int
    """Alive."""
    num_waiting: int
    """Requests for boxes that wait for one."""
    num_running: int
    """Commands that run now."""
    num_created: int
    """Boxes so far."""
    num_commands: int
    """Commands so far."""
    num_infra_errors: int
    """Commands that ended because their box failed."""
    num_expired: int
    """Boxes that were destroyed because their client vanished."""
    num_refused: int
    """Requests with a wrong token."""


class Malformed(Exception):
    """A body that is not the message it should be."""


def encode(message: Record) -> bytes:
    """A body.

    Raises:
        ValueError: text that is no Unicode, a number beyond 64 bits.
    """
    try:
        return msgspec.msgpack.encode(message)
    except OverflowError as error:
        raise ValueError(str(error)) from error


def decode(body: bytes, kind: type[T]) -> T:
    """A message from a body.

    Raises:
        Malformed: it is none of that kind.
    """
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except (msgspec.DecodeError, RecursionError) as error:
        raise Malformed(f"not a {kind.__name__}: {error}") from error
    except UnicodeDecodeError as error:
        raise Malformed(f"not a {kind.__name__}: text that is not UTF-8") from error
