"""Messages between a pool and its keeper: length-prefixed MessagePack over a socket pair."""

import os
import struct

import msgspec

from burnish.core.boxes import Capabilities, ExecResult, Limits
from burnish.core.records import Record

HEADER = struct.Struct("!I")
MAX_MESSAGE_BYTES = 256 * 2**20
MAX_DATA_BYTES = MAX_MESSAGE_BYTES - 2**10
"""Of a file in one."""


class CreateBox(Record, frozen=True, kw_only=True, tag="create"):
    """Wait for a free place and make a box; answered by `Done` with its number in `box`."""

    id: int
    root: str = ""
    """Directory with the root file system of an image; empty: this host's programs."""
    digest: str = ""
    """Of the image."""
    user: tuple[int, int] | None = None
    """User and group of its commands, where an image says so."""
    proxy_port: int = 0
    """Its commands get a socket there; 0: no network but the loopback."""
    state: int = 0
    """Number of the state that it goes on from; 0: an empty box."""


class DestroyBox(Record, frozen=True, kw_only=True, tag="destroy"):
    """End whatever runs in a box and remove it."""

    id: int
    box: int


class Exec(Record, frozen=True, kw_only=True, tag="exec"):
    """Run a command."""

    id: int
    box: int
    argv: tuple[bytes, ...]
    """File names need not be UTF-8, here and below."""
    stdin: bytes
    env: dict[str, bytes]
    cwd: bytes
    limits: Limits
    keep: bool = False
    """What it leaves behind lives on."""

    @property
    def variables(self) -> dict[str, str]:
        """`env`, as `os.environ` has it."""
        return {name: os.fsdecode(value) for name, value in self.env.items()}

    @property
    def directory(self) -> str:
        """`cwd`, as `os.getcwd` has it."""
        return os.fsdecode(self.cwd)


class Listen(Record, frozen=True, kw_only=True, tag="listen"):
    """Make the network of the next command; its socket goes over the second connection."""

    id: int
    box: int


class WriteFile(Record, frozen=True, kw_only=True, tag="write"):
    """Write a file below /work."""

    id: int
    box: int
    path: bytes
    data: bytes


class ReadFile(Record, frozen=True, kw_only=True, tag="read"):
    """Read a file below /work."""

    id: int
    box: int
    path: bytes
    limit_bytes: int


class Save(Record, frozen=True, kw_only=True, tag="save"):
    """Keep files and processes of a box as a state; answered by `Done` with its number."""

    id: int
    box: int


class Restore(Record, frozen=True, kw_only=True, tag="restore"):
    """Put a state into a box."""

    id: int
    box: int
    state: int


class Forget(Record, frozen=True, kw_only=True, tag="forget"):
    """Free a state, if it is there."""

    id: int
    state: int


class Cancel(Record, frozen=True, kw_only=True, tag="cancel"):
    """Abandon the request `id`. It is still answered."""

    id: int


Request = (
    CreateBox | DestroyBox | Exec | Listen | WriteFile | ReadFile | Save | Restore | Forget | Cancel
)


class Hello(Record, frozen=True, kw_only=True, tag="hello"):
    """First words of a keeper."""

    capabilities: Capabilities | None
    """None if no box can run here."""
    problem: str = ""
    """Then: what is wrong."""
    fix: str = ""
    """Then: what to do."""


class Done(Record, frozen=True, kw_only=True, tag="done"):
    """Success; the field that fits the request is set."""

    id: int
    box: int = -1
    state: int = 0
    data: bytes = b""
    result: ExecResult | None = None
    listening: bool = False
    """The next message of the second connection has the socket."""


class Failed(Record, frozen=True, kw_only=True, tag="failed"):
    """The request failed."""

    id: int
    errno: int
    """Number of the OSError; 0 if the box itself is at fault."""
    message: str
    size_bytes: int = 0
    """With EFBIG: how large the file is that should have been read."""
    fix: str = ""
    """Set if it is a user's mistake: what to do."""


Reply = Hello | Done | Failed

_requests: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_replies: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)


def encode(message: Request | Reply) -> bytes:
    """With its length in front.

    Raises:
        ValueError: too large.
    """
    body = msgspec.msgpack.encode(message)
    if len(body) > MAX_MESSAGE_BYTES:
        raise ValueError(f"a message to the sandbox may have {MAX_MESSAGE_BYTES} bytes at most")
    return HEADER.pack(len(body)) + body


def decode_request(body: bytes) -> Request:
    """Inverse of `encode`, without the length."""
    return _requests.decode(body)


def decode_reply(body: bytes) -> Reply:
    """Inverse of `encode`, without the length."""
    return _replies.decode(body)
