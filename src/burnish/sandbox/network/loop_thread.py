"""An event loop in a thread of its own."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future

_LAST_WORK_S = 5.0


class LoopThread:
    """Starts with the first call, ends with `close`.

    Usable from any thread and loop.
    """

    def __init__(self, name: str) -> None:
        """Starts nothing yet."""
        self._name = name
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._ended: Future[None] = Future()
        self._closed = False

    def call(self, work: Callable[[], None]) -> None:
        """Run soon, without waiting for it."""
        self._running().call_soon_threadsafe(work)

    async def run(self, work: Callable[[], Awaitable[None]]) -> None:
        """Run and wait; the work goes on if the caller is cancelled."""

        async def working() -> None:
            await work()

        done = asyncio.run_coroutine_threadsafe(working(), self._running())
        await asyncio.shield(asyncio.wrap_future(done))

    async def close(self, last: Callable[[], Awaitable[None]]) -> None:
        """Do one last thing, wait for what else is running, end the thread.

        May be called again, by several at once: all return when it has ended.
        """
        with self._lock:
            first, self._closed = not self._closed, True
            loop, thread = self._loop, self._thread
        if loop is None or thread is None:
            return
        if first:
            asyncio.run_coroutine_threadsafe(self._finish(last), loop)
        await asyncio.shield(asyncio.wrap_future(self._ended))
        thread.join()

    async def _finish(self, last: Callable[[], Awaitable[None]]) -> None:
        loop = asyncio.get_running_loop()
        try:
            await last()
            if others := asyncio.all_tasks() - {asyncio.current_task()}:
                await asyncio.wait(others, timeout=_LAST_WORK_S)
        finally:
            loop.stop()

    def _running(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._closed:
                raise RuntimeError(f"{self._name} was closed")
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(
                    target=self._work, args=(self._loop,), name=self._name, daemon=True
                )
                self._thread.start()
            return self._loop

    def _work(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            loop.run_forever()
            if left := asyncio.all_tasks(loop):
                for task in left:
                    task.cancel()
                loop.run_until_complete(asyncio.wait(left))
        finally:
            loop.close()
            self._ended.set_result(None)
