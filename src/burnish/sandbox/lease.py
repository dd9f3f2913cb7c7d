"""The longest time that a box is lent for, used or not: `SandboxConfig.lease_s`."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from burnish.sandbox.cancellation import uninterrupted


def lease_ended(lease_s: float) -> str:
    """What users of a box are told."""
    return f"the lease of the box has ended: it lives for {lease_s:g} s (sandbox.lease_s)"


@asynccontextmanager
async def leased(
    lease_s: float | None, end: Callable[[str], Coroutine[Any, Any, None]]
) -> AsyncIterator[None]:
    """Call `end` with the reason when the context has lasted so long; None: never.

    An `end` that has begun is waited for, so that nothing of the box is left behind the context.
    """
    if lease_s is None:
        yield
        return
    reason, endings = lease_ended(lease_s), list[asyncio.Future[None]]()
    loop = asyncio.get_running_loop()
    timer = loop.call_later(lease_s, lambda: endings.append(asyncio.ensure_future(end(reason))))
    try:
        yield
    finally:
        timer.cancel()
        for ending in endings:
            await uninterrupted(ending)
