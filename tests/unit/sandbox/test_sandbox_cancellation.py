"""Waiting that survives cancellation leaves nothing behind it."""

import asyncio
import gc
import weakref
from collections.abc import Awaitable, Callable, Iterator

import pytest

from burnish.sandbox.cancellation import insist, uninterrupted


class Payload:
    """What a caller has in hand while it waits."""


@pytest.fixture
def no_collections() -> Iterator[None]:
    """Only what nobody refers to goes."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


async def wait_uninterrupted(until: asyncio.Event) -> None:
    await uninterrupted(asyncio.ensure_future(until.wait()))


async def wait_insisting(until: asyncio.Event) -> None:
    cancelled = await insist(until.wait)
    try:
        if cancelled is not None:
            raise cancelled
    finally:
        del cancelled


@pytest.mark.usefixtures("no_collections")
@pytest.mark.parametrize("wait", [wait_uninterrupted, wait_insisting])
@pytest.mark.parametrize("num_cancels", [1, 2])
def test_who_was_cancelled_while_waiting_lets_go_of_all_it_held(
    wait: Callable[[asyncio.Event], Awaitable[None]], num_cancels: int
) -> None:
    async def main() -> bool:
        until = asyncio.Event()
        held: list[weakref.ref[Payload]] = []

        async def work() -> None:
            payload = Payload()
            held.append(weakref.ref(payload))
            await wait(until)

        task = asyncio.create_task(work())
        for _ in range(num_cancels):
            await asyncio.sleep(0)
            task.cancel()
        await asyncio.sleep(0)
        until.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        del task
        await asyncio.sleep(0)
        return held[0]() is None

    assert asyncio.run(main())
