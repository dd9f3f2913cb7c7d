"""A thread with an event loop: for callers on any loop, or on none, who may block theirs."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class LoopThread:
    """Runs coroutines elsewhere: they go on even while a caller's own loop is stuck."""

    def __init__(self, name: str = "sandbox-remote") -> None:
        """Start the thread `name`; it does not keep the interpreter alive."""
        self._loop = asyncio.new_event_loop()
        self._lock = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    async def run(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Await the work here; if the caller is cancelled, so is the work.

        Raises:
            RuntimeError: closed.
        """
        return await asyncio.wrap_future(self._submit(work))

    def run_blocking(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """For callers without a loop.

        Raises:
            RuntimeError: closed.
        """
        return self._submit(work).result()

    def close(self) -> None:
        """Cancel what runs and end the thread; may be called twice."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        asyncio.run_coroutine_threadsafe(_cancel_others(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _submit(self, work: Callable[[], Coroutine[Any, Any, T]]) -> Future[T]:
        with self._lock:
            if self._closed:
                raise RuntimeError("the loop is closed")
            return asyncio.run_coroutine_threadsafe(work(), self._loop)


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    if others:
        await asyncio.wait(others)
