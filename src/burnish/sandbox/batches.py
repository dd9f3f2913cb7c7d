"""Several boxes at once, all or none, from a pool that makes them one by one.

    take --> turn (one batch at a time) --> all enter together --> user --> all leave
                                                  |
                                  one fails, or the caller is cancelled: all leave

Two batches that each held a part of what they want would wait for each other for ever: hence the
turn. It is the turn of one pool: clients of a fleet of several hosts have each their own.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager

from burnish.core.boxes import Sandbox
from burnish.sandbox.cancellation import insist
from burnish.sandbox.places import Places

Box = AbstractAsyncContextManager[Sandbox]


class Batches:
    """Those of one pool; for any event loop."""

    def __init__(self) -> None:
        """Nobody has the turn."""
        self._turn = Places(1)

    @asynccontextmanager
    async def take(
        self, count: int, most: int, acquire: Callable[[], Box]
    ) -> AsyncIterator[tuple[Sandbox, ...]]:
        """So many boxes.

        Args:
            count: how many.
            most: how many the pool can have.
            acquire: promises one.

        Raises:
            ValueError: `count` is not from 1 to `most`. Else what `acquire` and its boxes raise.
        """
        if not 1 <= count <= most:
            raise ValueError(f"asked for {count} boxes at once: 1 to {most} can be had")
        async with AsyncExitStack() as stack:
            ticket = await self._turn.take()
            try:
                boxes = await _all_of([acquire() for _ in range(count)], stack)
            finally:
                self._turn.give_back(ticket)
            yield boxes


async def _all_of(promised: Sequence[Box], stack: AsyncExitStack) -> tuple[Sandbox, ...]:
    """All boxes, which leave with `stack`; when this fails none is on its way any more."""
    tasks = [asyncio.create_task(stack.enter_async_context(box)) for box in promised]
    try:
        return tuple(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            # Cancelled with us it may be in the midst of its tidying up already.
            if not task.cancelling():
                task.cancel()
        await insist(lambda: asyncio.wait(tasks))
        raise
