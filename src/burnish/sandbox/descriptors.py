"""Work on open files in threads that outlive whoever waits for them."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, asynccontextmanager
from typing import TypeVar

from burnish.sandbox.archive.stop import Stop

T = TypeVar("T")

# Of their own: what takes long because a box has many files must not hold up everything else that
# waits for one of the loop's few threads.
_THREADS = ThreadPoolExecutor(4, thread_name_prefix="files of boxes")


async def on_own_descriptors(
    work: Callable[[list[int]], T], descriptors: Sequence[int], stop: Stop | None = None
) -> T:
    """Call `work` in a thread, with duplicates of `descriptors` that are closed after it.

    Cancellation ends the waiting, not the thread, but sets `stop`. With the descriptors of its
    caller it would go on in whatever is opened next under the same numbers: with what a box wrote,
    in files of the host.

    Raises:
        OSError: there is no room for more open files; else what `work` raises.
    """
    own: list[int] = []
    try:
        own += (os.dup(descriptor) for descriptor in descriptors)
    except BaseException:
        _close(own)
        raise

    def run() -> T:
        try:
            return work(own)
        finally:
            _close(own)

    # A future and not a task, and shielded: nothing keeps it from beginning, and so from closing.
    running = asyncio.get_running_loop().run_in_executor(_THREADS, run)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        if stop is not None:
            stop.set()
        running.add_done_callback(_told)
        raise


@asynccontextmanager
async def in_threads(place: AbstractContextManager[T]) -> AsyncIterator[T]:
    """A context that is entered and left in threads, where that blocks."""
    value = await asyncio.to_thread(place.__enter__)
    try:
        yield value
    except BaseException as error:
        if not await asyncio.to_thread(place.__exit__, type(error), error, error.__traceback__):
            raise
    else:
        await asyncio.to_thread(place.__exit__, None, None, None)


def _told(done: asyncio.Future[T]) -> None:
    """Nobody asks any more how it ended."""
    if not done.cancelled():
        done.exception()


def _close(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
