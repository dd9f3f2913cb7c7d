"""What a line of an audit log says, and the only way in which it may be written.

A line is JSON in ASCII with sorted keys and without spaces: whatever a name or a message from a box
contains is escaped, so it can neither end a line nor look like another field. `prev` is the SHA-256
of the line before, without its newline; that of the first line is `GENESIS`, or for a fork the hash
of the parent's `fork` line.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import msgspec

from burnish.core.boxes import ExecStatus, Limits, Policy, Usage
from burnish.core.records import Record
from burnish.sandbox.network.events import Reason, Verdict

VERSION = 1
GENESIS = hashlib.sha256(b"burnish audit log 1").hexdigest()
MAX_LINE_BYTES = 1 << 20
"""Longer lines are not ours: names and commands are cut to fit."""

_MAX_ARGV_CHARS = 16 * 2**10
# One character takes at most 12 bytes as JSON (a surrogate pair): with this, a line stays far below
# MAX_LINE_BYTES, and programs passed as an argument are kept up to a readable length.
_MAX_TEXT_CHARS = 4096


class Event(Record, frozen=True, kw_only=True, tag_field="kind"):
    """What happened."""


class Created(Event, frozen=True, kw_only=True, tag="create"):
    """The box was made. Always the first line."""

    backend: str
    """Name of the backend."""
    isolation: str
    """`Isolation` of the backend."""
    kernel: str
    """Release of the host's kernel."""
    image: str | None
    """Name of the image; None: the host's own programs."""
    image_digest: str | None
    """Digest of its content, where known."""
    policy: Policy
    """What it may touch."""
    policy_digest: str
    """Digest of `policy`."""
    parent: str | None = None
    """For a fork: id of the box that it came from."""
    snapshot: str | None = None
    """For a fork: id of the snapshot that it starts from; None: the parent's present state."""


class Started(Event, frozen=True, kw_only=True, tag="exec"):
    """A command is about to start."""

    argv: tuple[str, ...]
    """Program and arguments, cut if long."""
    argv_digest: str
    """Of all of it."""
    env_digest: str
    """Of names and values; values may be secret and are not kept."""
    cwd: str
    """Where it starts; empty: where the image says, else `/work`."""
    stdin_digest: str
    """What it reads."""
    keep: bool
    """Whether processes may outlive it."""
    limits: Limits
    """What was asked for."""
    layers: tuple[str, ...]
    """Stack of layers below it."""


class Ended(Event, frozen=True, kw_only=True, tag="result"):
    """A command ended."""

    of: int
    """Number of its `exec` line."""
    status: ExecStatus
    """How."""
    exit_code: int | None
    """Exit status if it exited."""
    signal: int | None
    """Signal if it was killed."""
    truncated: bool
    """Whether output was cut."""
    usage: Usage
    """What it used."""
    limit_hit: str | None
    """Kind of limit that ended it or cut its output."""
    stdout_digest: str
    """Of what was kept."""
    stderr_digest: str
    """Of what was kept."""
    message: str
    """Why, for failures of the box and of the policy."""
    layers: tuple[str, ...]
    """Stack of layers when it had ended."""


class Put(Event, frozen=True, kw_only=True, tag="put"):
    """A file is about to be written into the box."""

    path: str
    """Below /work."""
    num_bytes: int
    """Length."""
    digest: str
    """Of the content."""


class Got(Event, frozen=True, kw_only=True, tag="get"):
    """A file was read from the box."""

    path: str
    """Below /work."""
    num_bytes: int
    """Length of what was read."""
    digest: str
    """Of what was read."""


class Snapshotted(Event, frozen=True, kw_only=True, tag="snapshot"):
    """The state was frozen."""

    snapshot: str
    """Its id."""
    num_layers: int
    """Layers above the image."""


class RolledBack(Event, frozen=True, kw_only=True, tag="rollback"):
    """The box is about to go back to a snapshot."""

    snapshot: str
    """Its id."""


class Forked(Event, frozen=True, kw_only=True, tag="fork"):
    """Copies are about to be made; their chains begin with the hash of this line."""

    count: int
    """How many."""
    snapshot: str | None
    """What they start from; None: the present state."""


class Exported(Event, frozen=True, kw_only=True, tag="export"):
    """The changes were written to a tar."""

    snapshot: str | None
    """Of which state; None: the present one."""
    digest: str
    """As `export_tar` returned it."""


class Imported(Event, frozen=True, kw_only=True, tag="import"):
    """A tar is about to be unpacked into the box."""

    digest: str
    """SHA-256 of the archive as a file."""


class AllowChanged(Event, frozen=True, kw_only=True, tag="allow"):
    """The allow-list is about to be replaced."""

    allow: tuple[str, ...]
    """The new one."""


class NetworkDecided(Event, frozen=True, kw_only=True, tag="network"):
    """What the proxy decided about a connection; fields as in `NetworkEvent`."""

    host: str
    """What was asked for."""
    port: int
    """Its port."""
    address: str
    """Address that the connection is pinned to, or empty."""
    verdict: Verdict
    """What was decided."""
    reason: Reason
    """Why."""
    bytes_out: int
    """From the box to the server."""
    bytes_in: int
    """From the server to the box."""


class Failed(Event, frozen=True, kw_only=True, tag="failed"):
    """An operation raised, or its caller gave up."""

    operation: str
    """Such as `exec`, `put`, `snapshot`."""
    of: int | None
    """Number of the line that announced it, if one did."""
    error: str
    """One line."""


class Gap(Event, frozen=True, kw_only=True, tag="gap"):
    """Lines that could not be written before this one."""

    num_lost: int
    """How many."""
    error: str
    """Why, in one line."""


class Destroyed(Event, frozen=True, kw_only=True, tag="destroy"):
    """The box is gone. Always the last line of a log whose owner was not killed."""


AnyEvent = (
    Created
    | Started
    | Ended
    | Put
    | Got
    | Snapshotted
    | RolledBack
    | Forked
    | Exported
    | Imported
    | AllowChanged
    | NetworkDecided
    | Failed
    | Gap
    | Destroyed
)


class Line(Record, frozen=True, kw_only=True):
    """One line of a log."""

    version: int
    """Of this format."""
    number: int
    """From 0, without gaps."""
    time_s: float
    """Unix time; informative, as clocks can be set."""
    box: str
    """Id of the box."""
    prev: str
    """SHA-256 of the line before."""
    event: AnyEvent
    """What happened."""


_ENCODER = json.JSONEncoder(ensure_ascii=True, sort_keys=True, separators=(",", ":"))


def encode(line: Line) -> bytes:
    """The canonical bytes of a line, without the newline."""
    return _ENCODER.encode(msgspec.to_builtins(line)).encode("ascii")


def decode(data: bytes) -> Line:
    """The line that was written as exactly these bytes.

    Raises:
        ValueError: it was not written by `encode`, says in a few words why.
    """
    try:
        tree: Any = json.loads(data.decode("ascii"))
    except (ValueError, RecursionError) as error:
        raise ValueError("it is not JSON in ASCII") from error
    version = tree.get("version") if isinstance(tree, dict) else None
    if isinstance(version, int) and version != VERSION:
        raise ValueError(f"its format has version {version}, this program knows {VERSION}")
    try:
        line = msgspec.convert(tree, Line)
    except msgspec.ValidationError as error:
        raise ValueError(f"it is not a line of an audit log: {error}") from error
    if encode(line) != data:
        raise ValueError("it is not written as this program writes")
    return line


def digest(data: bytes) -> str:
    """SHA-256 in hex."""
    return hashlib.sha256(data).hexdigest()


def digest_of_text(parts: tuple[str, ...]) -> str:
    """SHA-256 of strings, each ended by NUL, which none contains."""
    text = "".join(f"{part}\0" for part in parts)
    return digest(text.encode("utf-8", "surrogatepass"))


def digest_of_env(env: Mapping[str, str] | None) -> str:
    """SHA-256 of the variables in order of their names."""
    return digest_of_text(tuple(f"{name}={value}" for name, value in sorted((env or {}).items())))


def digest_of_record(record: Record) -> str:
    """SHA-256 of a record's canonical JSON."""
    return digest(_ENCODER.encode(msgspec.to_builtins(record)).encode("ascii"))


def cut_text(text: str) -> str:
    """At most a readable length."""
    return text if len(text) <= _MAX_TEXT_CHARS else text[: _MAX_TEXT_CHARS - 3] + "..."


def cut_argv(argv: tuple[str, ...]) -> tuple[str, ...]:
    """The first arguments, and a note where some is missing; `argv_digest` covers all."""
    if sum(map(len, argv)) <= _MAX_ARGV_CHARS and len(argv) <= _MAX_TEXT_CHARS:
        return argv
    kept: list[str] = []
    room = _MAX_ARGV_CHARS
    for argument in argv[:_MAX_TEXT_CHARS]:
        if len(argument) > room:
            kept.append(argument[:room] + "...")
            break
        kept.append(argument)
        room -= len(argument)
    return (*kept, f"[{len(argv)} arguments in all]")
