"""An answer on its way from the engine's thread to the event loop that waits for it."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, TypeVar

from burnish.core.records import GenerationDelta

T = TypeVar("T")


class Reply(Generic[T]):
    """A future of one event loop that another thread completes."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        """Create the future in `loop`; call this from the loop's own thread."""
        self._loop = loop
        self.future: asyncio.Future[T] = loop.create_future()

    def resolve(self, value: T) -> None:
        """Deliver a value, unless the waiter has gone."""
        _post(self._loop, lambda: self._settle(lambda: self.future.set_result(value)))

    def fail(self, error: Exception) -> None:
        """Deliver an exception, unless the waiter has gone."""
        _post(self._loop, lambda: self._settle(lambda: self.future.set_exception(error)))

    def _settle(self, action: Callable[[], None]) -> None:
        if not self.future.done():
            action()


class Stream:
    """Deltas for one event loop, pushed by another thread. They never exceed one generation."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        """Nothing sent; call this from the loop's own thread."""
        self._loop = loop
        self._queue: asyncio.Queue[GenerationDelta | Exception] = asyncio.Queue()
        self.num_sent = 0
        """Tokens pushed so far."""

    def push(self, delta: GenerationDelta) -> None:
        """Deliver new tokens, unless the loop has gone."""
        self.num_sent += len(delta.token_ids)
        _post(self._loop, lambda: self._queue.put_nowait(delta))

    def fail(self, error: Exception) -> None:
        """Deliver the exception that ends it, unless the loop has gone."""
        _post(self._loop, lambda: self._queue.put_nowait(error))

    async def next(self) -> GenerationDelta:
        """The next delta; raises what ended the stream."""
        item = await self._queue.get()
        if isinstance(item, Exception):
            raise item
        return item


def _post(loop: asyncio.AbstractEventLoop, action: Callable[[], None]) -> None:
    # RuntimeError: the loop is closed, so nobody waits any more.
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(action)
