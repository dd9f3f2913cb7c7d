"""SOCKS version 5 without authentication (RFC 1928): only CONNECT."""

import asyncio
import ipaddress
from enum import IntEnum

from burnish.sandbox.network.events import Reason, Refused
from burnish.sandbox.network.http_head import Authority

VERSION = 5
_NO_AUTHENTICATION = 0
_NO_METHOD = 0xFF
_CONNECT = 1
_NAME = 3
_ADDRESS_BYTES = {1: 4, 4: 16}


class Reply(IntEnum):
    """What the client is told."""

    SUCCEEDED = 0
    GENERAL_FAILURE = 1
    NOT_ALLOWED = 2
    HOST_UNREACHABLE = 4
    TTL_EXPIRED = 6
    COMMAND_NOT_SUPPORTED = 7


_REPLIES = {
    Reason.COMMAND: Reply.COMMAND_NOT_SUPPORTED,
    Reason.UNRESOLVED: Reply.HOST_UNREACHABLE,
    Reason.UNREACHABLE: Reply.HOST_UNREACHABLE,
    Reason.TIMEOUT: Reply.TTL_EXPIRED,
    Reason.BAD_REQUEST: Reply.GENERAL_FAILURE,
}


def reply(code: Reply) -> bytes:
    """A reply; the bound address is of no use to anyone and stays zero."""
    return bytes((VERSION, code, 0, 1)) + bytes(6)


def refusal(reason: Reason) -> bytes:
    """The reply for a refused request."""
    return reply(_REPLIES.get(reason, Reply.NOT_ALLOWED))


async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Agree on no authentication; the first byte was read already.

    Raises:
        Refused: the client insists on authentication.
        asyncio.IncompleteReadError: it hung up.
    """
    (count,) = await reader.readexactly(1)
    if _NO_AUTHENTICATION not in await reader.readexactly(count):
        writer.write(bytes((VERSION, _NO_METHOD)))
        raise Refused(Reason.COMMAND, "only SOCKS without authentication")
    writer.write(bytes((VERSION, _NO_AUTHENTICATION)))


async def read_request(reader: asyncio.StreamReader) -> tuple[Authority, bool]:
    """Read what is asked for, and whether the command is CONNECT.

    Raises:
        Refused: malformed.
        asyncio.IncompleteReadError: the client hung up.
    """
    version, command, reserved, kind = await reader.readexactly(4)
    if version != VERSION or reserved != 0:
        raise Refused(Reason.BAD_REQUEST, "malformed SOCKS request")
    if kind == _NAME:
        (size,) = await reader.readexactly(1)
        host = (await reader.readexactly(size)).decode("latin-1")
    elif kind in _ADDRESS_BYTES:
        host = _spell(await reader.readexactly(_ADDRESS_BYTES[kind]))
    else:
        raise Refused(Reason.BAD_REQUEST, "malformed SOCKS request")
    port = int.from_bytes(await reader.readexactly(2))
    return Authority(host, port), command == _CONNECT


def _spell(packed: bytes) -> str:
    return str(ipaddress.ip_address(packed))
