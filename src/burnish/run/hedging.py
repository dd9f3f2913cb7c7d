r"""A second box is asked for when the first takes unusually long; the one that comes first is used.

    ask --> box within the usual time ------------------------> used
        \-> not yet: ask again --> whichever comes first -----> used
                                   the other one -------------> given back

When to ask again, and how often at most, is for `schedule.breakers.hedging` to say. Only starting a
box is hedged. Generations never are, since the first of two is the shorter one; verdicts are not,
since an episode is judged once.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from burnish.core.boxes import Sandbox
from burnish.core.clock import Clock
from burnish.schedule.breakers.hedging import Hedges

Ask = Callable[[], AbstractAsyncContextManager[Sandbox]]


class BoxHedging:
    """Of one event loop."""

    def __init__(self, clock: Clock) -> None:
        """Nothing is known, so nothing is hedged."""
        self._clock, self._hedges = clock, Hedges()
        # Losers give their boxes back by themselves; nobody waits for them.
        self._losing: set[asyncio.Task[None]] = set()
        self.on_hedged: Callable[[str, float], None] = lambda call, after_s: None

    @property
    def num_hedged(self) -> int:
        """Second requests so far."""
        return self._hedges.num_hedged

    @asynccontextmanager
    async def box(self, ask: Ask, call: str) -> AsyncIterator[Sandbox]:
        """The first box that `ask`, called once or twice, gives; `call` names its kind.

        Raises:
            UserError: whatever the first request raised, once no request is left.
            ClassifiedFailure: likewise.
        """
        start_s = self._clock.now_s()
        holders = [_Holder(ask())]
        try:
            delay_s = self._hedges.delay_s(call)
            if delay_s is not None:
                await asyncio.wait([holders[0].settled], timeout=delay_s)
                if not holders[0].settled.done():
                    self._hedges.asked_again()
                    self.on_hedged(call, delay_s)
                    holders.append(_Holder(ask()))
            holder = await _first(holders)
            self._hedges.answered(call, self._clock.now_s() - start_s)
        except BaseException:
            self._abandon(holders)
            raise
        self._abandon([other for other in holders if other is not holder])
        assert holder.box is not None
        try:
            yield holder.box
        finally:
            holder.release.set()
            await holder.task

    def _abandon(self, holders: list[_Holder]) -> None:
        for holder in holders:
            holder.task.cancel()
            self._losing.add(holder.task)
            holder.task.add_done_callback(self._gone)

    def _gone(self, task: asyncio.Task[None]) -> None:
        self._losing.discard(task)
        if not task.cancelled():
            # What a loser died of is nobody's trouble, but it must be looked at.
            task.exception()


class _Holder:
    """Enters and leaves a box's context in a task of its own, so that it can be abandoned."""

    def __init__(self, context: AbstractAsyncContextManager[Sandbox]) -> None:
        self.box: Sandbox | None = None
        self.release = asyncio.Event()
        self.settled: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.task = asyncio.create_task(self._hold(context))
        self.task.add_done_callback(lambda _: self._settle())

    async def _hold(self, context: AbstractAsyncContextManager[Sandbox]) -> None:
        async with context as box:
            self.box = box
            self._settle()
            await self.release.wait()

    def _settle(self) -> None:
        if not self.settled.done():
            self.settled.set_result(None)


async def _first(holders: list[_Holder]) -> _Holder:
    while True:
        for holder in holders:
            if holder.box is not None:
                return holder
        waiting = [h.settled for h in holders if not h.settled.done()]
        if not waiting:
            await holders[0].task
            raise AssertionError("a request without a box has failed")
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
