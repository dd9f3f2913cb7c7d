"""The first bytes that a client sends through an open connection."""

import asyncio
from typing import NamedTuple

from burnish.sandbox.network.events import Reason, Refused
from burnish.sandbox.network.http_body import BodyFramer
from burnish.sandbox.network.http_head import (
    MAX_HEAD_BYTES,
    looks_like_http,
    parse_head,
    plain_request,
)
from burnish.sandbox.network.policy import Host, read_host
from burnish.sandbox.network.tls import HANDSHAKE, HelloReader

HTTP_PORT = 80
TLS_PORT = 443
_CHUNK_BYTES = 4096
_END = b"\r\n\r\n"


class Opening(NamedTuple):
    """What may go to the server."""

    data: bytes
    """The first bytes, checked."""
    framer: BodyFramer | None
    """Decides what may follow; None: anything."""


async def inspect(reader: asyncio.StreamReader, host: Host, port: int) -> Opening:
    """Read until it is clear that the client talks to the server that it asked for.

    A TLS hello must name it, whatever the port. Port 443 takes nothing else, port 80 takes one
    plain request. On other ports, which are open only if the list names them, ordinary HTTP
    requests are checked the same way and all else passes: it may be SSH or a database.

    Raises:
        Refused: it talks to someone else, or cannot be understood.
        asyncio.IncompleteReadError: the client hung up.
    """
    data = await reader.read(_CHUNK_BYTES)
    if data and data[0] == HANDSHAKE:
        return await _inspect_tls(reader, data, host)
    if data and port == TLS_PORT:
        raise Refused(Reason.NOT_TLS, "only TLS on port 443")
    while port != HTTP_PORT:
        is_http = looks_like_http(data)
        if is_http:
            break
        more = await reader.read(_CHUNK_BYTES) if is_http is None else b""
        if not more or len(data) > MAX_HEAD_BYTES:
            return Opening(data + more, None)
        data += more
    return await _inspect_http(reader, data, host, port)


async def _inspect_tls(reader: asyncio.StreamReader, data: bytes, host: Host) -> Opening:
    hello = HelloReader()
    while (name := hello.feed(data)) is None:
        data = await _more(reader)
    if name == "" and host.is_address:
        return Opening(bytes(hello.raw), None)  # RFC 6066: an address is never a server name
    if name == "":
        raise Refused(Reason.NO_SERVER_NAME, "the TLS hello names no server")
    if read_host(name) != host:
        raise Refused(Reason.SERVER_NAME, "the TLS hello names another server")
    return Opening(bytes(hello.raw), None)


async def _inspect_http(
    reader: asyncio.StreamReader, start: bytes, host: Host, port: int
) -> Opening:
    data = bytearray(start)
    seen = 0
    while (end := data.find(_END, seen)) < 0:
        if len(data) > MAX_HEAD_BYTES:
            raise Refused(Reason.BAD_REQUEST, "the request is too long")
        seen = max(0, len(data) - len(_END))
        data += await _more(reader)
    end += len(_END)
    request = plain_request(parse_head(bytes(data[:end])), host, port)
    return Opening(request.head + request.framer.feed(bytes(data[end:])), request.framer)


async def _more(reader: asyncio.StreamReader) -> bytes:
    if not (data := await reader.read(_CHUNK_BYTES)):
        raise asyncio.IncompleteReadError(b"", None)
    return data
