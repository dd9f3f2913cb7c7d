"""The proxy of one box: accepts on sockets that live in the box, serves on the host.

All methods run in the loop of the proxy's thread; `provider.py` is the way in from other loops.
"""

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Callable

from burnish.sandbox.network.bounds import ProxyBounds
from burnish.sandbox.network.connection import Connection, Services
from burnish.sandbox.network.events import EventSink, NetworkEvent, Reason, Verdict, printable
from burnish.sandbox.network.policy import AllowRules, decide
from burnish.sandbox.network.shares import Shares
from burnish.sandbox.network.upstream import BUFFER_BYTES, Outside

_LOG = logging.getLogger(__name__)
_ACCEPT_PAUSE_S = 0.1


class BoxProxy:
    """Serves one box. Starts to accept with `start`, ends with `close`."""

    def __init__(
        self,
        box_id: str,
        rules: AllowRules,
        outside: Outside,
        bounds: ProxyBounds,
        *,
        shares: Shares,
        sink: EventSink,
        now: Callable[[], float],
    ) -> None:
        """Does nothing yet."""
        self.box_id = box_id
        """Whose it is."""
        self._rules = rules
        self._bounds = bounds
        self._sink = sink
        self._now = now
        self._shares = shares
        self._freed = asyncio.Event()
        lookups = asyncio.Semaphore(bounds.num_lookups)
        self._services = Services(bounds, outside, lookups, lambda: self._rules, self._emit)
        self._connections: set[Connection] = set()
        self._accepting: asyncio.Task[None] | None = None
        self._num_denials = 0

    def start(self, listener: socket.socket) -> None:
        """Accept on a listening socket, which is closed with the proxy."""
        assert self._accepting is None
        self._shares.num_boxes += 1
        listener.setblocking(False)
        self._accepting = asyncio.create_task(self._accept(listener))
        self._accepting.add_done_callback(lambda task: self._accepted(task, listener))

    async def set_rules(self, rules: AllowRules) -> None:
        """Judge by new rules; what is open and no longer allowed is cut before this returns."""
        self._rules = rules
        await self._cut(
            Reason.POLICY_CHANGED,
            {
                connection
                for connection in self._connections
                if connection.asked and not decide(connection.host, connection.port, rules).allowed
            },
        )

    async def close(self) -> None:
        """Stop accepting and cut what is open."""
        accepting, self._accepting = self._accepting, None
        if accepting is not None:
            self._shares.num_boxes -= 1
            accepting.cancel()
            await asyncio.wait({accepting})
        await self._cut(Reason.CLOSED, set(self._connections))

    async def _cut(self, reason: Reason, connections: set[Connection]) -> None:
        tasks = {connection.task for connection in connections if connection.task is not None}
        for connection in connections:
            connection.stop(reason)
        if tasks:
            await asyncio.wait(tasks)

    async def _accept(self, listener: socket.socket) -> None:
        while True:
            while len(self._connections) >= self._shares.num_each:
                self._freed.clear()
                await self._freed.wait()
            await _readable(listener)
            if not os.get_blocking(listener.fileno()):
                await self._accept_one(listener)
            else:
                # Only the other holder of the socket, an init that was taken over, can do that:
                # to have us wait in accept(), and all other boxes with us.
                raise PermissionError("the box made its socket a blocking one")

    async def _accept_one(self, listener: socket.socket) -> None:
        try:
            accepted, _ = listener.accept()
        except (BlockingIOError, ConnectionError):
            return  # it was gone before we came
        except OSError as error:  # no descriptors or memory left: those of others may end
            _LOG.warning("box %s: cannot accept a connection: %s", self.box_id, error)
            await asyncio.sleep(_ACCEPT_PAUSE_S)
            return
        accepted.setblocking(False)
        try:
            streams = await asyncio.open_connection(sock=accepted, limit=BUFFER_BYTES)
        except (OSError, asyncio.CancelledError) as error:
            accepted.close()
            if isinstance(error, OSError):
                return
            raise
        self._serve(Connection(*streams, self._services))

    def _serve(self, connection: Connection) -> None:
        def over(task: asyncio.Task[None]) -> None:
            connection.abort()
            self._connections.discard(connection)
            self._freed.set()
            if not task.cancelled() and (error := task.exception()) is not None:
                _LOG.error("box %s: a connection failed", self.box_id, exc_info=error)

        self._connections.add(connection)
        connection.task = asyncio.create_task(connection.serve())
        connection.task.add_done_callback(over)

    def _accepted(self, task: asyncio.Task[None], listener: socket.socket) -> None:
        _close_listener(listener)
        if not task.cancelled() and (error := task.exception()) is not None:
            _LOG.error("box %s: it has no network any more", self.box_id, exc_info=error)

    def _emit(self, connection: Connection, verdict: Verdict, reason: Reason) -> None:
        self._sink(
            NetworkEvent(
                time=self._now(),
                box=self.box_id,
                host=printable(connection.host),
                port=connection.port,
                address=connection.address,
                verdict=verdict,
                reason=reason,
                bytes_out=connection.bytes_out,
                bytes_in=connection.bytes_in,
            )
        )
        if verdict is Verdict.DENIED:
            self._num_denials += 1
            if self._num_denials == self._bounds.num_denials:
                self._give_up()

    def _give_up(self) -> None:
        """A box that asks for so much that it may not have gets nothing more."""
        if self._accepting is None:
            return
        last = NetworkEvent(
            time=self._now(),
            box=self.box_id,
            host="",
            port=0,
            address="",
            verdict=Verdict.DENIED,
            reason=Reason.TOO_MANY,
        )
        self._accepting.add_done_callback(lambda _: self._sink(last))
        self._accepting.cancel()


async def _readable(listener: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(listener, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(listener)


def _close_listener(listener: socket.socket) -> None:
    path = listener.getsockname() if listener.family == socket.AF_UNIX else None
    listener.close()
    if path:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
