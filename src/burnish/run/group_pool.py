"""The sandbox pool as one group sees it: boxes are hedged, and how long it held them is counted."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial

from burnish.core.boxes import Policy, Sandbox, SandboxPool
from burnish.core.clock import Clock
from burnish.run.hedging import BoxHedging
from burnish.sandbox.forwarding import ForwardingPool


class GroupPool(ForwardingPool):
    """Around the run's pool, for the episodes of one group."""

    def __init__(
        self,
        pool: SandboxPool,
        clock: Clock,
        hedging: BoxHedging | None,
        held: Callable[[float], None],
    ) -> None:
        """Tell `held` for how long each box was held."""
        super().__init__(pool)
        self._clock, self._hedging, self._held = clock, hedging, held

    def acquire(
        self, image: str | None = None, policy: Policy | None = None
    ) -> AbstractAsyncContextManager[Sandbox]:
        """See `SandboxPool.acquire`."""
        if self._hedging is None:
            return self._counted(self._pool.acquire(image, policy))
        ask = partial(self._pool.acquire, image, policy)
        return self._counted(self._hedging.box(ask, f"box {image or ''}".rstrip()))

    def acquire_many(
        self, count: int, image: str | None = None, policy: Policy | None = None
    ) -> AbstractAsyncContextManager[tuple[Sandbox, ...]]:
        """See `SandboxPool.acquire_many`. They are not hedged: all come, or none."""
        return self._counted_many(self._pool.acquire_many(count, image, policy))

    @asynccontextmanager
    async def _counted(
        self, context: AbstractAsyncContextManager[Sandbox]
    ) -> AsyncIterator[Sandbox]:
        async with context as box:
            start_s = self._clock.now_s()
            try:
                yield box
            finally:
                self._held(self._clock.now_s() - start_s)

    @asynccontextmanager
    async def _counted_many(
        self, context: AbstractAsyncContextManager[tuple[Sandbox, ...]]
    ) -> AsyncIterator[tuple[Sandbox, ...]]:
        async with context as boxes:
            start_s = self._clock.now_s()
            try:
                yield boxes
            finally:
                for _ in boxes:
                    self._held(self._clock.now_s() - start_s)
