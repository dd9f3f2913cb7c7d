"""Where a server listens: sockets, the token, TLS; and how it ends in order."""

import asyncio
import contextlib
import os
import signal
import socket
import ssl
import stat
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from ipaddress import ip_address
from pathlib import Path

from aiohttp import web

from burnish.core.boxes import SandboxPool
from burnish.core.clock import Clock
from burnish.core.disk import require_regular
from burnish.core.errors import UserError
from burnish.sandbox.remote.config import ServeConfig
from burnish.sandbox.remote.door import open_door, room_for_connections
from burnish.sandbox.remote.server import SandboxServer
from burnish.sandbox.remote.token_file import TOKEN_FIX, read_tokens

# Longest path of a Unix socket, its final NUL aside.
_MAX_SOCKET_PATH = 107
# Requests that are still under way at the end have been told so by then.
_SHUTDOWN_S = 2.0
_BACKLOG = 1024


async def serve(
    pool: SandboxPool,
    config: ServeConfig,
    *,
    max_boxes: int,
    ready: Callable[[str], None],
    before_idle_exit: Callable[[], bool] = lambda: True,
) -> None:
    """Serve until SIGTERM, SIGINT or idleness; then destroy all boxes and close the pool.

    Args:
        pool: where boxes come from.
        config: where to listen and what to grant.
        max_boxes: how many the pool can have.
        ready: called with the URL once clients can come.
        before_idle_exit: last word before ending for idleness; False: go on.

    Raises:
        UserError: it cannot listen there, or must not.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with listening(pool, config, max_boxes=max_boxes) as (url, server):
        ready(url)
        while not stop.is_set():
            waits = [asyncio.ensure_future(event.wait()) for event in (stop, server.idle)]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for wait in waits:
                wait.cancel()
            if server.idle.is_set() and before_idle_exit():
                return
            server.idle.clear()


@asynccontextmanager
async def listening(
    pool: SandboxPool, config: ServeConfig, *, max_boxes: int, clock: Clock | None = None
) -> AsyncIterator[tuple[str, SandboxServer]]:
    """A server that answers inside the context; the pool is closed at its end.

    Raises:
        UserError: it cannot listen there, or must not.
    """
    # Everything that can be wrong with the configuration is found before anything is open.
    try:
        tokens = read_tokens(config.token_file) if config.token_file else None
        context = _tls(config)
        sock, url = _listen(config, has_token=tokens is not None, tls=context is not None)
    except UserError:
        await pool.close()
        raise
    address = config.socket.lstat() if config.socket is not None else None
    server = SandboxServer(pool, config, max_boxes=max_boxes, tokens=tokens, clock=clock)
    runner = web.AppRunner(
        server.application(),
        handler_cancellation=True,
        access_log=None,
        shutdown_timeout=_SHUTDOWN_S,
    )
    try:
        await runner.setup()
        assert runner.server is not None
        visitors = server.visitors
        visitors.most = config.max_connections or room_for_connections()
        async with open_door(sock, runner.server, visitors, context, config.head_s):
            yield url, server
    finally:
        await runner.cleanup()
        sock.close()
        if config.socket is not None:
            _unlink_own(config.socket, address)


def _tls(config: ServeConfig) -> ssl.SSLContext | None:
    if config.tls_cert is None and config.tls_key is None:
        return None
    if config.tls_cert is None or config.tls_key is None:
        raise UserError("TLS takes a certificate and a key.", fix="give --tls-cert and --tls-key")
    if config.socket is not None:
        raise UserError("a Unix socket needs no TLS.", fix="leave --tls-cert and --tls-key out")
    for path in (config.tls_cert, config.tls_key):
        require_regular(path, "give PEM files")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(config.tls_cert, config.tls_key, password=lambda: b"")
    except (OSError, ssl.SSLError) as error:
        raise UserError(
            f"{config.tls_cert} and {config.tls_key} are no certificate and key: {error}.",
            fix="give two PEM files that belong together, without a passphrase",
        ) from error
    return context


def _listen(config: ServeConfig, *, has_token: bool, tls: bool) -> tuple[socket.socket, str]:
    if (config.listen is None) == (config.socket is None):
        raise UserError("a server listens in one place.", fix="give either --listen or --socket")
    if config.socket is not None:
        return _listen_unix(config.socket), f"http+unix://{config.socket.absolute()}"
    assert config.listen is not None
    host, port = split_address(config.listen)
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        what = f"--listen {config.listen}: {error.strerror}."
        raise UserError(what, fix="give an address of this machine, as 127.0.0.1:8321") from error
    if not ip_address(str(address[0]).partition("%")[0]).is_loopback and not has_token:
        raise UserError(
            f"--listen {config.listen}: others could run code here, as there is no token.",
            fix=TOKEN_FIX,
        )
    try:
        sock = socket.create_server(address[:2], family=family, backlog=_BACKLOG)
    except OSError as error:
        what = f"--listen {config.listen}: {error.strerror}."
        raise UserError(what, fix="choose another port, or 0 for a free one") from error
    shown = f"[{host}]" if ":" in host else host
    return sock, f"http{'s' if tls else ''}://{shown}:{sock.getsockname()[1]}"


def split_address(text: str) -> tuple[str, int]:
    """HOST:PORT, also [::1]:PORT.

    Raises:
        UserError: it is none.
    """
    host, separator, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not separator or not host or not port.isascii() or not port.isdecimal():
        what = f"--listen {text} is no HOST:PORT."
        raise UserError(what, fix="as in --listen 127.0.0.1:8321 or --listen [::1]:8321")
    if int(port) > 65535:
        raise UserError(f"--listen {text}: there is no such port.", fix="use 0 to 65535")
    return host, int(port)


def _listen_unix(path: Path) -> socket.socket:
    if len(os.fsencode(path)) > _MAX_SOCKET_PATH:
        raise UserError(
            f"the path of the socket is too long: {path}.",
            fix=f"use at most {_MAX_SOCKET_PATH} bytes",
        )
    _remove_stale(path)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)
    try:
        sock.bind(str(path))
        sock.listen(_BACKLOG)
    except OSError as error:
        sock.close()
        what = f"cannot listen at {path}: {error.strerror}."
        raise UserError(what, fix="give a path in a directory of your own") from error
    finally:
        os.umask(before)
    return sock


def _unlink_own(path: Path, address: os.stat_result | None) -> None:
    """Another server may have taken the path since ours was removed."""
    with contextlib.suppress(FileNotFoundError):
        if address is not None and os.path.samestat(path.lstat(), address):
            path.unlink()


def _remove_stale(path: Path) -> None:
    """What a killed server left; anything else is not ours to remove."""
    try:
        found = path.lstat()
    except OSError:
        return
    if stat.S_ISSOCK(found.st_mode) and found.st_uid == os.getuid():
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            try:
                probe.connect(str(path))
            except ConnectionRefusedError:
                with contextlib.suppress(FileNotFoundError):
                    path.unlink()
                return
            except OSError:
                pass
        raise UserError(f"a server listens at {path} already.", fix="use it, or another path")
    raise UserError(f"{path} is in the way.", fix="choose another path for the socket")
