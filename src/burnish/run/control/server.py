"""Listens on a Unix socket that only its owner can open.

The socket is made with mode 0600 and every peer's user is checked once more: a directory that
somebody opened up to others does not open the run. What a client sends can slow nobody down: lines
are short, silent clients are hung up on, and few are listened to at once.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import msgspec

from burnish.core.errors import ClassifiedFailure, UserError
from burnish.run.control.messages import MAX_LINE_BYTES, Answer

Handler = Callable[[bytes], Awaitable[Answer]]

_MAX_CLIENTS = 16
_SILENCE_S = 30.0
_CREDENTIALS = struct.Struct("3i")


@asynccontextmanager
async def serve_control(path: Path, handle: Handler) -> AsyncIterator[None]:
    """Answer requests at `path` while inside.

    Raises:
        UserError: the socket cannot be made there.
    """
    clients = asyncio.Semaphore(_MAX_CLIENTS)
    talks: set[asyncio.Task[None]] = set()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None, "start_unix_server makes one for each client"
        talks.add(task)
        try:
            if clients.locked() or not _is_ours(writer):
                return
            async with clients:
                await _converse(reader, writer, handle)
        except (ConnectionError, TimeoutError):
            pass
        except asyncio.CancelledError:
            # By the end of this server, below. Python 3.11 prints a traceback of one that gets out;
            # an answer that was given has left already, unless its client does not read.
            writer.transport.abort()
        finally:
            talks.discard(task)
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()

    listener = _listen(path)
    forget = path.unlink
    server = await asyncio.start_unix_server(talk, sock=listener, limit=MAX_LINE_BYTES)
    try:
        yield
    finally:
        server.close()
        for task in talks:
            task.cancel()
        with suppress(FileNotFoundError):
            forget()
        await asyncio.gather(*talks)


async def _converse(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, handle: Handler
) -> None:
    while True:
        try:
            # Not `wait_for`: that of Python 3.11 may lose a cancellation (python/cpython#86296).
            async with asyncio.timeout(_SILENCE_S):
                line = await reader.readuntil(b"\n")
        except asyncio.IncompleteReadError:
            return
        except asyncio.LimitOverrunError:
            await _say(writer, Answer(ok=False, error=f"longer than {MAX_LINE_BYTES} bytes"))
            return
        try:
            answer = await handle(line)
        except (UserError, ClassifiedFailure) as error:
            answer = Answer(ok=False, error=str(error))
        await _say(writer, answer)


async def _say(writer: asyncio.StreamWriter, answer: Answer) -> None:
    writer.write(msgspec.json.encode(answer) + b"\n")
    async with asyncio.timeout(_SILENCE_S):
        await writer.drain()


def _listen(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)
    try:
        # A run holds the lock of its directory, so a socket that is already there is a dead one.
        path.unlink(missing_ok=True)
        with ShortName(path) as name:
            listener.bind(name)
        listener.listen(_MAX_CLIENTS)
    except OSError as error:
        listener.close()
        raise UserError(
            f"{path}: no control socket can be made ({error.strerror}).",
            fix="set run.directory to a place on a local file system.",
        ) from error
    finally:
        os.umask(before)
    return listener


class ShortName:
    """A name for `path` that fits a socket address: 108 bytes, which run directories may exceed."""

    def __init__(self, path: Path) -> None:
        """The directory must exist."""
        self._path = path
        self._directory = -1

    def __enter__(self) -> str:
        """Through the open directory."""
        self._directory = os.open(self._path.parent, os.O_PATH | os.O_DIRECTORY)
        return f"/proc/self/fd/{self._directory}/{self._path.name}"

    def __exit__(self, *_: object) -> None:
        """The name is void."""
        os.close(self._directory)


def _is_ours(writer: asyncio.StreamWriter) -> bool:
    peer = writer.get_extra_info("socket")
    data = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    uid = _CREDENTIALS.unpack(data)[1]
    return uid in (os.geteuid(), 0)
