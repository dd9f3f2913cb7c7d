"""One client connection: what is asked for, whether it may be, and the bytes.

ask (HTTP or SOCKS) -> decide -> resolve, choose, dial -> first bytes -> both directions -> end
     any step may refuse: one event, one answer to the client, closed
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from enum import Enum
from typing import NamedTuple, TypeVar

from burnish.sandbox.network import socks
from burnish.sandbox.network.ask import Ask, Speech, read_http, read_socks, refusal
from burnish.sandbox.network.bounds import ProxyBounds
from burnish.sandbox.network.events import Reason, Refused, Verdict
from burnish.sandbox.network.http_head import plain_request
from burnish.sandbox.network.idle import IdleTimer
from burnish.sandbox.network.inspection import HTTP_PORT, TLS_PORT, Opening, inspect
from burnish.sandbox.network.policy import AllowRules, Host, decide
from burnish.sandbox.network.upstream import Outside, Upstream, finish

_CHUNK_BYTES = 64 * 2**10
T = TypeVar("T")


class Stage(Enum):
    """How far a connection has come; decides what its last event says."""

    ASKING = 0
    ASKED = 1
    """It is known what the client wants."""
    ALLOWED = 2
    """The event was emitted: bytes flow."""
    OVER = 3
    """The last event was emitted."""


class Services(NamedTuple):
    """What a connection gets from the proxy of its box."""

    bounds: ProxyBounds
    outside: Outside
    lookups: asyncio.Semaphore
    rules: Callable[[], AllowRules]
    emit: Callable[["Connection", Verdict, Reason], None]


class Connection:
    """Serves one accepted connection; `serve` runs once, in a task of its own."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, services: Services
    ) -> None:
        """Nothing is read yet."""
        self._reader = reader
        self._writer = writer
        self._services = services
        self._upstream: Upstream | None = None
        self._stage = Stage.ASKING
        self._speech = Speech.NONE
        self._stopped: Reason | None = None
        self._idle = IdleTimer(services.bounds.idle_s, lambda: self.stop(Reason.TIMEOUT))
        self.task: asyncio.Task[None] | None = None
        self.host = ""
        """What was asked for."""
        self.port = 0
        """Its port; 0 until it is known."""
        self.address = ""
        """What it is pinned to."""
        self.bytes_out = 0
        """To the server."""
        self.bytes_in = 0
        """From the server."""

    @property
    def asked(self) -> bool:
        """Whether it is known what the client wants."""
        return self._stage in (Stage.ASKED, Stage.ALLOWED)

    def stop(self, reason: Reason) -> None:
        """Cut it now."""
        self._stopped = self._stopped or reason
        if self.task is not None:
            self.task.cancel()

    def abort(self) -> None:
        """Drop both sockets; may be called again."""
        self._idle.stop()
        self._writer.transport.abort()
        if self._upstream is not None:
            self._upstream.writer.transport.abort()

    async def serve(self) -> None:
        """Until both sides are done."""
        try:
            await self._serve()
            self._end(Reason.FINISHED)
            await finish(self._writer, self._services.bounds.linger_s)
        except Refused as refused:
            self._stage = Stage.OVER
            self._services.emit(self, Verdict.DENIED, refused.reason)
            await self._refuse(refusal(refused, self._speech))
        except asyncio.CancelledError:
            self._end(self._stopped or Reason.CLOSED)
            raise
        except (OSError, asyncio.IncompleteReadError):
            self._end(Reason.BROKEN)
        finally:
            self.abort()

    def _end(self, reason: Reason) -> None:
        """The one last word about a connection that got as far as asking."""
        stage, self._stage = self._stage, Stage.OVER
        if stage is Stage.ALLOWED:
            self._services.emit(self, Verdict.ENDED, reason)
        elif stage is Stage.ASKED:
            self._services.emit(self, Verdict.DENIED, reason)

    async def _serve(self) -> None:
        ask = await self._in_time(self._ask())
        host, opening = self._decide(ask)
        port = self.port
        self._upstream = await self._services.outside.open(host, port, self._services.lookups)
        self.address = self._upstream.address
        if opening is None:
            self._writer.write(ask.accepted)
            self._speech = Speech.TUNNEL
            if port in (HTTP_PORT, TLS_PORT):
                opening = await self._in_time(inspect(self._reader, host, port))
        self._services.emit(self, Verdict.ALLOWED, Reason.ON_LIST)
        self._stage = Stage.ALLOWED
        self._idle.start()
        await self._flow(self._upstream, host, opening)

    async def _in_time(self, waited: Awaitable[T]) -> T:
        try:
            async with asyncio.timeout(self._services.bounds.head_s):
                return await waited
        except TimeoutError:
            raise Refused(Reason.TIMEOUT, "the request did not come in time") from None

    async def _ask(self) -> Ask:
        first = await self._reader.readexactly(1)
        if first[0] == socks.VERSION:
            await socks.greet(self._reader, self._writer)
            self._speech = Speech.SOCKS
            return await read_socks(self._reader)
        self._speech = Speech.HTTP
        return await read_http(self._reader, first)

    def _decide(self, ask: Ask) -> tuple[Host, Opening | None]:
        self.host, self.port = ask.authority
        self._stage = Stage.ASKED
        if ask.problem is not None:
            raise ask.problem
        decision = decide(self.host, self.port, self._services.rules())
        if not decision.allowed:
            raise Refused(decision.reason, f"{self.host}:{self.port} is not on the allow list")
        self.host = decision.host.text
        if ask.head is None:
            return decision.host, None
        if self.port == TLS_PORT:
            raise Refused(Reason.NOT_TLS, "only TLS on port 443")
        return decision.host, Opening(*plain_request(ask.head, decision.host, self.port))

    async def _flow(self, upstream: Upstream, host: Host, opening: Opening | None) -> None:
        """Both directions until both are done; the client has `linger_s` once the server is."""
        up = asyncio.create_task(self._to_server(upstream.writer, host, opening))
        down = asyncio.create_task(self._to_client(upstream.reader))
        pending = {up, down}
        try:
            while pending:
                done, pending = await asyncio.wait(
                    pending,
                    timeout=self._services.bounds.linger_s if down.done() else None,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                for task in done:
                    task.result()
                if not done:
                    break
        finally:
            up.cancel()
            down.cancel()
            await asyncio.gather(up, down, return_exceptions=True)
        await finish(upstream.writer, self._services.bounds.linger_s)

    async def _to_server(
        self, writer: asyncio.StreamWriter, host: Host, opening: Opening | None
    ) -> None:
        data, framer = opening or await inspect(self._reader, host, self.port)
        while True:
            if data:
                writer.write(data)
                self.bytes_out += len(data)
                await writer.drain()
            if not (data := await self._reader.read(_CHUNK_BYTES)):
                break
            self._idle.touch()
            if framer is not None:  # what follows the one request is read and dropped
                data = b"" if framer.done else framer.feed(data)
        if framer is None or not framer.done:
            writer.write_eof()

    async def _to_client(self, reader: asyncio.StreamReader) -> None:
        while data := await reader.read(_CHUNK_BYTES):
            self._idle.touch()
            self._writer.write(data)
            self.bytes_in += len(data)
            await self._writer.drain()
        self._writer.write_eof()

    async def _refuse(self, answer: bytes) -> None:
        """Answer, then read on for a moment: a reset would take the answer from the client."""
        left = self._services.bounds.linger_bytes
        with contextlib.suppress(OSError):
            async with asyncio.timeout(self._services.bounds.linger_s):
                self._writer.write(answer)
                self._writer.write_eof()
                while left > 0 and (data := await self._reader.read(_CHUNK_BYTES)):
                    left -= len(data)
