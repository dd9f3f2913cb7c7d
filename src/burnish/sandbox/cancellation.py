"""Waiting that survives cancellation and crosses event loops."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")


async def uninterrupted(task: asyncio.Future[T], on_cancel: Callable[[], None] | None = None) -> T:
    """Wait to the end although we are being cancelled; then the cancellation goes on.

    A loop that is being closed cancels the task too: that ends the waiting.

    Args:
        task: what must come to its end.
        on_cancel: tells it to come to its end early.
    """
    cancelled: asyncio.CancelledError | None = None
    try:
        while True:
            try:
                result = await asyncio.shield(task)
            except asyncio.CancelledError as error:
                if task.done():
                    raise
                cancelled = error
                if on_cancel is not None:
                    on_cancel()
            else:
                if cancelled is not None:
                    raise cancelled
                return result
    finally:
        # An exception holds the frames that it came through. If one of them held it, both would
        # stay until a collection, with all that the callers have in hand.
        del cancelled


async def insist(step: Callable[[], Awaitable[object]]) -> asyncio.CancelledError | None:
    """Await `step`, again after each cancellation; returns the last one, for the caller to raise.

    There is no task in between that a loop which is being closed could cancel, so this is for what
    must happen even then. Each call of `step` must make a new awaitable. The caller
    must `del` what it got after it has raised it, as in `uninterrupted`.
    """
    cancelled: asyncio.CancelledError | None = None
    while True:
        try:
            await step()
        except asyncio.CancelledError as error:
            cancelled = error
        else:
            try:
                return cancelled
            finally:
                del cancelled


def resolve(
    future: asyncio.Future[T], value: T, on_lost: Callable[[T], None] | None = None
) -> None:
    """Give a future its result, from whatever thread or loop we are in.

    If nobody waits any more, or the loop of the future has ended, `on_lost` gets the value.
    """

    def put() -> None:
        if not future.done():
            future.set_result(value)
        elif on_lost is not None:
            on_lost(value)

    loop = future.get_loop()
    if current_loop() is loop:
        put()
        return
    try:
        loop.call_soon_threadsafe(put)
    except RuntimeError:
        if on_lost is not None:
            on_lost(value)


def current_loop() -> asyncio.AbstractEventLoop | None:
    """The loop that runs in this thread."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
