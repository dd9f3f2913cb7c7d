"""What a client wants of the proxy: HTTP and SOCKS on one port, told apart by the first byte."""

import asyncio
from enum import Enum
from typing import NamedTuple

from burnish.sandbox.network import socks, tls
from burnish.sandbox.network.events import Reason, Refused, printable
from burnish.sandbox.network.http_head import (
    Authority,
    Head,
    parse_authority,
    parse_head,
    split_absolute,
)


class Speech(Enum):
    """How the client is answered when it is refused."""

    NONE = "none"
    """It has not said enough."""
    HTTP = "http"
    SOCKS = "socks"
    TUNNEL = "tunnel"
    """The way is open: in the protocol inside."""


class Ask(NamedTuple):
    """A request for a way out."""

    authority: Authority
    accepted: bytes
    """The answer when the way is open; none to a plain request, which the server answers."""
    head: Head | None = None
    """The plain request."""
    problem: Refused | None = None
    """Why this cannot be, wherever it goes."""


_ESTABLISHED = b"HTTP/1.1 200 Connection established\r\n\r\n"
_TLS_REASONS = frozenset(
    {Reason.BAD_HELLO, Reason.NO_SERVER_NAME, Reason.SERVER_NAME, Reason.HIDDEN_SERVER_NAME}
)
_HTTP_REASONS = frozenset({Reason.BAD_REQUEST, Reason.HOST_HEADER, Reason.NESTED_CONNECT})
_STATUS = {
    Reason.BAD_REQUEST: "400 Bad Request",
    Reason.TIMEOUT: "408 Request Timeout",
    Reason.UNRESOLVED: "502 Bad Gateway",
    Reason.UNREACHABLE: "502 Bad Gateway",
}


async def read_http(reader: asyncio.StreamReader, first: bytes) -> Ask:
    """Read a request to a proxy.

    Raises:
        Refused: it is malformed.
        asyncio.IncompleteReadError: the client hung up.
    """
    try:
        head = parse_head(first + await reader.readuntil(b"\r\n\r\n"))
    except asyncio.LimitOverrunError:
        raise Refused(Reason.BAD_REQUEST, "the request is too long") from None
    if head.method == "CONNECT":
        return Ask(parse_authority(head.target, None), _ESTABLISHED)
    authority, head = split_absolute(head)
    return Ask(authority, b"", head)


async def read_socks(reader: asyncio.StreamReader) -> Ask:
    """Read a request of SOCKS 5, after the greeting."""
    authority, connects = await socks.read_request(reader)
    problem = None if connects else Refused(Reason.COMMAND, "only the SOCKS command CONNECT")
    return Ask(authority, socks.reply(socks.Reply.SUCCEEDED), problem=problem)


def refusal(refused: Refused, speech: Speech) -> bytes:
    """What the client is told."""
    if speech is Speech.SOCKS:
        return socks.refusal(refused.reason)
    if speech is Speech.HTTP or (speech is Speech.TUNNEL and refused.reason in _HTTP_REASONS):
        return _http_refusal(refused)
    if speech is Speech.TUNNEL and refused.reason in _TLS_REASONS:
        return tls.ACCESS_DENIED_ALERT
    return b""


def _http_refusal(refused: Refused) -> bytes:
    status = _STATUS.get(refused.reason, "403 Forbidden")
    body = f"burnish: {printable(str(refused))} ({refused.reason})\n"
    return (
        f"HTTP/1.1 {status}\r\nContent-Type: text/plain\r\nContent-Length: {len(body)}\r\n"
        f"Connection: close\r\n\r\n{body}"
    ).encode("ascii")
