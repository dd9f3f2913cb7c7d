"""An answer on its way from the engine's thread to the event loop that waits for it."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, TypeVar

T = TypeVar("T")


class Reply(Generic[T]):
    """A future of one event loop that another thread completes."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        """Create the future in `loop`; call this from the loop's own thread."""
        self._loop = loop
        self.future: asyncio.Future[T] = loop.create_future()

    def resolve(self, value: T) -> None:
        """Deliver a value, unless the waiter has gone."""
        self._post(lambda: self.future.set_result(value))

    def fail(self, error: Exception) -> None:
        """Deliver an exception, unless the waiter has gone."""
        self._post(lambda: self.future.set_exception(error))

    def _post(self, action: Callable[[], None]) -> None:
        # RuntimeError: the loop is closed, so nobody waits any more.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._settle, action)

    def _settle(self, action: Callable[[], None]) -> None:
        if not self.future.done():
            action()
