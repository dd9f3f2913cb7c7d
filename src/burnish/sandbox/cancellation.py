"""Waiting that survives cancellation and crosses event loops."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def uninterrupted(task: asyncio.Future[T]) -> T:
    """Wait to the end although we are being cancelled; then the cancellation goes on."""
    cancelled: asyncio.CancelledError | None = None
    while True:
        try:
            result = await asyncio.shield(task)
        except asyncio.CancelledError as error:
            if task.cancelled():
                raise
            cancelled = error
        else:
            if cancelled is not None:
                raise cancelled
            return result


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
