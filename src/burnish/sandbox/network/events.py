"""What the proxy decided, as records, and the refusals that it decides with."""

from collections.abc import Callable
from enum import StrEnum

from burnish.core.records import Record

MAX_TEXT = 255


class Verdict(StrEnum):
    """What an event says."""

    ALLOWED = "allowed"
    """Bytes may flow from now on."""
    DENIED = "denied"
    """The connection was refused, or cut because of what it carried."""
    ENDED = "ended"
    """An allowed connection is over; carries its byte counts."""


class Reason(StrEnum):
    """Why."""

    ON_LIST = "on_list"
    """The list allows it."""
    NOT_LISTED = "not_listed"
    """No entry has this name."""
    PORT = "port"
    """The name is listed, the port is not."""
    IP_LITERAL = "ip_literal"
    """An address in place of a name."""
    BAD_NAME = "bad_name"
    """Not a host name."""
    UNRESOLVED = "unresolved"
    """The name has no address."""
    ADDRESS = "address"
    """It has none but private, local or special ones."""
    UNREACHABLE = "unreachable"
    """The server does not answer."""
    NOT_TLS = "not_tls"
    """Port 443 without a TLS hello."""
    BAD_HELLO = "bad_hello"
    """A malformed or oversized TLS hello."""
    NO_SERVER_NAME = "no_server_name"
    """A TLS hello that does not say which server it wants."""
    SERVER_NAME = "server_name"
    """A TLS hello for another server."""
    HIDDEN_SERVER_NAME = "hidden_server_name"
    """A TLS hello with an encrypted server name."""
    BAD_REQUEST = "bad_request"
    """Malformed, oversized or ambiguous HTTP or SOCKS."""
    HOST_HEADER = "host_header"
    """No Host, several, or another one."""
    NESTED_CONNECT = "nested_connect"
    """A CONNECT inside a connection that was allowed for HTTP."""
    COMMAND = "command"
    """A SOCKS command other than CONNECT, or a version other than 5."""
    TIMEOUT = "timeout"
    """Nothing came, or too slowly."""
    POLICY_CHANGED = "policy_changed"
    """The list became shorter while it was open."""
    TOO_MANY = "too_many"
    """So many refusals that this box has no network any more."""
    FINISHED = "finished"
    """Both sides were done."""
    BROKEN = "broken"
    """One side reset it."""
    CLOSED = "closed"
    """The box ended."""


class NetworkEvent(Record, frozen=True, kw_only=True):
    """One decision about one connection of a box."""

    time: float
    """Seconds since the epoch."""
    box: str
    """Id of the box."""
    host: str
    """What was asked for, in printable ASCII; empty if it did not come so far."""
    port: int
    """Its port; 0 if it did not come so far."""
    address: str
    """The address that the connection is pinned to; empty if none was chosen."""
    verdict: Verdict
    """What was decided."""
    reason: Reason
    """Why."""
    bytes_out: int = 0
    """From the box to the server."""
    bytes_in: int = 0
    """From the server to the box."""


EventSink = Callable[[NetworkEvent], None]
"""Where events go. Called in the thread of the proxy; if it raises, the connection is cut: what
cannot be logged is not allowed."""


class Refused(Exception):
    """A connection that must not be, or not go on."""

    def __init__(self, reason: Reason, detail: str = "") -> None:
        """`detail` is one line for the client."""
        super().__init__(detail or reason.value)
        self.reason = reason


def printable(text: str) -> str:
    """Hostile text for a log: printable ASCII without line breaks, bounded."""
    return text[:MAX_TEXT].encode("unicode_escape").decode("ascii")[:MAX_TEXT]
