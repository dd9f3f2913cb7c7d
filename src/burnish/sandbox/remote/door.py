"""Accepts connections, as many as leave the boxes their descriptors."""

import asyncio
import errno
import logging
import resource
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from aiohttp import web

from burnish.sandbox.remote.visitors import Visit, Visitors

_LOG = logging.getLogger(__name__)

# Beyond what waits, runs and idles at the bounds of `ServeConfig` there is nothing to be served.
_MOST = 4096
# Where the hard limit leaves no more: of all descriptors, and the rest is for boxes.
_SHARE = 4
_FULL = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_PAUSE_S = 0.2


def room_for_connections() -> int:
    """How many may be open beside the boxes of a pool that was made before.

    The pool has raised our limit to what its boxes need; it is raised by what connections need.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return _MOST
    wanted = soft + _MOST
    raised = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
    return min(_MOST, max(raised - soft, raised // _SHARE))


class _Guest(asyncio.Protocol):
    """Hands everything on to the protocol of HTTP, and says what it sees."""

    def __init__(self, inner: asyncio.Protocol, visit: Visit, visitors: Visitors) -> None:
        self._inner = inner
        self.visit = visit
        self._visitors = visitors

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.visit.close = transport.abort
        self._inner.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        self._visitors.heard(self.visit)
        self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        return self._inner.eof_received()

    def pause_writing(self) -> None:
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._inner.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._visitors.left(self.visit)
        self._inner.connection_lost(exc)


def visit_of(request: web.BaseRequest) -> Visit | None:
    """The connection on which a request came; None if it is closed already."""
    transport = request.transport
    if transport is None:
        return None
    guest = transport.get_protocol()
    assert isinstance(guest, _Guest)
    return guest.visit


@asynccontextmanager
async def open_door(
    sock: socket.socket,
    make_protocol: Callable[[], asyncio.Protocol],
    visitors: Visitors,
    tls: ssl.SSLContext | None,
    handshake_s: float,
) -> AsyncIterator[None]:
    """Accept while inside; connections that are open stay so at the end.

    Args:
        sock: listens.
        make_protocol: of HTTP, for one connection.
        visitors: keep the count.
        tls: the server's, if it speaks HTTPS.
        handshake_s: bound on the handshake of TLS.
    """
    sock.setblocking(False)
    entering: set[asyncio.Task[None]] = set()

    async def enter(accepted: socket.socket, visit: Visit) -> None:
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: _Guest(make_protocol(), visit, visitors),
                accepted,
                ssl=tls,
                ssl_handshake_timeout=handshake_s if tls else None,
            )
        except OSError:
            # No TLS, too slow, or gone: a stranger's trouble.
            visitors.left(visit)
        except asyncio.CancelledError:
            visitors.left(visit)
            raise

    async def accept_for_ever() -> None:
        while True:
            accepted = await _accept(sock)
            visit = visitors.come(lambda: None)
            if visit is None:
                accepted.close()
                continue
            task = asyncio.create_task(enter(accepted, visit))
            visit.close = task.cancel
            entering.add(task)
            task.add_done_callback(entering.discard)

    accepting = asyncio.create_task(accept_for_ever())
    try:
        yield
    finally:
        for task in (accepting, *entering):
            task.cancel()
        await asyncio.wait((accepting, *entering))


async def _accept(sock: socket.socket) -> socket.socket:
    loop = asyncio.get_running_loop()
    told = False
    while True:
        # Where many come at once `sock_accept` never waits, and nothing else would run.
        await asyncio.sleep(0)
        try:
            return (await loop.sock_accept(sock))[0]
        except OSError as error:
            if error.errno in _FULL:
                if not told:
                    _LOG.error("no connection can be accepted: %s", error.strerror)
                told = True
                await asyncio.sleep(_PAUSE_S)
