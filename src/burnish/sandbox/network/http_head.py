"""Heads of HTTP requests as a proxy must read them: strictly. Pure.

RFC 9110 and 9112. Whatever two servers might read in two ways (bare line feeds, folded lines, two
lengths) is refused. The head that goes on is written anew from what was understood.
"""

import re
from collections.abc import Iterable
from typing import NamedTuple

from burnish.sandbox.network.events import Reason, Refused
from burnish.sandbox.network.http_body import BodyFramer
from burnish.sandbox.network.policy import Host, read_host

MAX_HEAD_BYTES = 32 * 2**10
MAX_HEADERS = 128
_METHOD = re.compile(r"[A-Z]{1,20}")
_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_VALUE = re.compile(r"[\t\x20-\x7e\x80-\xff]*")
_TARGET = re.compile(r"[\x21-\x7e]+")
_AUTHORITY = re.compile(r"([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(?::([0-9]{1,5}))?")
_LENGTH = re.compile(r"[0-9]{1,18}")
# About one connection only (RFC 9110, section 7.6.1), and what could change its protocol.
_HOP_BY_HOP = frozenset(
    {
        *("connection", "keep-alive", "upgrade", "http2-settings", "te", "trailer"),
        *("proxy-connection", "proxy-authorization", "proxy-authenticate"),
        *("host", "content-length", "transfer-encoding"),
    }
)
_KNOWN_METHODS = (
    *(b"GET ", b"HEAD ", b"POST ", b"PUT ", b"DELETE ", b"OPTIONS ", b"PATCH ", b"TRACE "),
    *(b"CONNECT ", b"PRI "),
)

Headers = tuple[tuple[str, str], ...]


class Head(NamedTuple):
    """A request, understood."""

    method: str
    target: str
    version: str
    headers: Headers

    def values(self, name: str) -> list[str]:
        """All values of a header."""
        return [value for key, value in self.headers if key.lower() == name]


class Authority(NamedTuple):
    """Host and port as a request names them."""

    host: str
    port: int


class PlainRequest(NamedTuple):
    """What goes to the server, and how its body ends."""

    head: bytes
    framer: BodyFramer


def looks_like_http(start: bytes) -> bool | None:
    """Whether these first bytes begin an ordinary request; None: too few to tell."""
    start = start.lstrip(b"\r\n")
    if any(start.startswith(method) for method in _KNOWN_METHODS):
        return True
    return None if any(method.startswith(start) for method in _KNOWN_METHODS) else False


def parse_head(data: bytes) -> Head:
    """Read a head, its final empty line included.

    Raises:
        Refused: it is not a plain, well-formed request of HTTP/1.
    """
    lines = data.decode("latin-1").split("\r\n")
    if lines[-2:] != ["", ""]:
        raise _bad("incomplete request")
    first = lines[0].split(" ")
    if len(first) != 3:
        raise _bad("malformed request line")
    method, target, version = first
    if not _METHOD.fullmatch(method) or not _TARGET.fullmatch(target):
        raise _bad("malformed request line")
    if version not in ("HTTP/1.1", "HTTP/1.0"):
        raise _bad("only HTTP/1.0 and HTTP/1.1 are spoken here")
    if len(lines) - 3 > MAX_HEADERS:
        raise _bad("too many headers")
    return Head(method, target, version, tuple(map(_parse_header, lines[1:-2])))


def _parse_header(line: str) -> tuple[str, str]:
    name, colon, value = line.partition(":")
    if not colon or not _NAME.fullmatch(name) or not _VALUE.fullmatch(value):
        raise _bad("malformed header")
    return name, value.strip(" \t")


def parse_authority(text: str, default_port: int | None) -> Authority:
    """Read `host:port`.

    Raises:
        Refused: it is malformed, or has no port and there is no default.
    """
    match = _AUTHORITY.fullmatch(text)
    port = match and (match[2] or default_port)
    if not match or not port or not 0 < int(port) < 65536:
        raise _bad("malformed host or port")
    return Authority(match[1], int(port))


def split_absolute(head: Head) -> tuple[Authority, Head]:
    """Where a request to a proxy goes, and the request as its server wants it.

    Raises:
        Refused: the target is not an absolute `http:` URI.
    """
    scheme, _, rest = head.target.partition("://")
    if scheme.lower() != "http" or not rest:
        raise _bad("ask this proxy for an absolute http:// URI, or CONNECT")
    cut = min((at for mark in "/?#" if (at := rest.find(mark)) >= 0), default=len(rest))
    target = rest[cut:]
    if not target.startswith("/"):
        target = "/" + target
    return parse_authority(rest[:cut], 80), head._replace(target=target)


def plain_request(head: Head, host: Host, port: int) -> PlainRequest:
    """A request in origin form for the server `host:port`, one per connection.

    Raises:
        Refused: it is for another server, could be read in two ways, or wants a tunnel.
    """
    if head.method == "CONNECT":
        raise Refused(Reason.NESTED_CONNECT, "no CONNECT inside of a connection")
    if not head.target.startswith("/") or "#" in head.target:
        raise _bad("malformed request target")
    named = head.values("host")
    if len(named) != 1:
        raise Refused(Reason.HOST_HEADER, "exactly one Host header is needed")
    authority = parse_authority(named[0], 80)
    if read_host(authority.host) != host or authority.port != port:
        raise Refused(Reason.HOST_HEADER, "the Host header names another server")
    shown = f"[{host.text}]" if ":" in host.text else host.text
    framing, framer = _framing(head)
    kept = [
        *((name, value) for name, value in head.headers if name.lower() not in _dropped(head)),
        *framing,
    ]
    lines = [
        f"{head.method} {head.target} {head.version}",
        f"Host: {shown}" if port == 80 else f"Host: {shown}:{port}",
        *(f"{name}: {value}" for name, value in kept),
        "Connection: close",
    ]
    return PlainRequest(("\r\n".join(lines) + "\r\n\r\n").encode("latin-1"), framer)


def _framing(head: Head) -> tuple[Headers, BodyFramer]:
    lengths = head.values("content-length")
    codings = head.values("transfer-encoding")
    if codings:
        if lengths or head.version == "HTTP/1.0" or [c.lower() for c in codings] != ["chunked"]:
            raise _bad("ambiguous length of the body")
        return (("Transfer-Encoding", "chunked"),), BodyFramer(None)
    if not lengths:
        return (), BodyFramer(0)
    if len(lengths) != 1 or not _LENGTH.fullmatch(lengths[0]):
        raise _bad("ambiguous length of the body")
    return (("Content-Length", lengths[0]),), BodyFramer(int(lengths[0]))


def _dropped(head: Head) -> frozenset[str]:
    named: Iterable[str] = (
        name.strip().lower() for value in head.values("connection") for name in value.split(",")
    )
    return _HOP_BY_HOP.union(named)


def _bad(detail: str) -> Refused:
    return Refused(Reason.BAD_REQUEST, detail)
