import asyncio
from contextlib import asynccontextmanager

import pytest

from burnish.core.clock import ManualClock
from burnish.core.errors import ClassifiedFailure
from burnish.core.records import Failure
from burnish.core.vocabulary import FailureKind
from burnish.run.group_pool import GroupPool
from burnish.run.hedging import BoxHedging


class Pool:
    """Hands out boxes named by order; those in `stuck` come only when told, `sick` ones never."""

    def __init__(self):
        self.stuck = {}
        self.sick = set()
        self.num_asked = 0
        self.alive = set()

    @asynccontextmanager
    async def acquire(self, image=None, policy=None):
        number, self.num_asked = self.num_asked, self.num_asked + 1
        if number in self.stuck:
            await self.stuck[number].wait()
        if number in self.sick:
            failure = Failure(kind=FailureKind.SANDBOX, where="pool", message="no box")
            raise ClassifiedFailure(failure)
        self.alive.add(number)
        try:
            yield number
        finally:
            self.alive.remove(number)


async def warmed():
    """A pool whose boxes are known to come at once."""
    pool, hedging = Pool(), BoxHedging(ManualClock())
    for _ in range(60):
        async with hedging.box(pool.acquire, "box"):
            pass
    assert pool.num_asked == 60
    return pool, hedging


async def settle():
    for _ in range(10):
        await asyncio.sleep(0)


def test_a_box_that_takes_unusually_long_is_asked_for_again_and_the_late_one_given_back():
    async def scene():
        pool, hedging = await warmed()
        told = []
        hedging.on_hedged = lambda call, after_s: told.append(call)
        pool.stuck[60] = late = asyncio.Event()
        async with hedging.box(pool.acquire, "box") as box:
            assert box == 61
            assert pool.alive == {61}
            late.set()
            await settle()
            assert pool.alive == {61}
        assert pool.alive == set()
        assert told == ["box"]
        assert hedging.num_hedged == 1

    asyncio.run(scene())


def test_the_first_box_is_used_if_it_comes_before_the_second():
    async def scene():
        pool, hedging = await warmed()
        pool.stuck = {60: asyncio.Event(), 61: asyncio.Event()}
        hedging.on_hedged = lambda call, after_s: pool.stuck[60].set()
        async with hedging.box(pool.acquire, "box") as box:
            assert box == 60
        await settle()
        assert pool.alive == set()

    asyncio.run(scene())


def test_nothing_is_hedged_before_it_is_known_what_is_usual_and_beyond_the_budget():
    async def scene():
        pool, hedging = Pool(), BoxHedging(ManualClock())
        pool.stuck[0] = asyncio.Event()
        asyncio.get_running_loop().call_soon(pool.stuck[0].set)
        async with hedging.box(pool.acquire, "box") as box:
            assert box == 0
        pool, hedging = await warmed()
        for _ in range(20):
            number = pool.num_asked
            pool.stuck = {number: asyncio.Event()}
            asyncio.get_running_loop().call_later(0.01, pool.stuck[number].set)
            async with hedging.box(pool.acquire, "box"):
                pass
        # Four saved up, and one more for each twenty that were answered.
        assert hedging.num_hedged <= 5

    asyncio.run(scene())


@pytest.mark.parametrize("sick", [{60}, {60, 61}])
def test_a_failure_counts_only_when_no_request_is_left(sick):
    async def scene():
        pool, hedging = await warmed()
        pool.sick, pool.stuck = sick, {60: asyncio.Event(), 61: asyncio.Event()}
        hedging.on_hedged = lambda call, after_s: [e.set() for e in pool.stuck.values()]
        if len(sick) == 1:
            async with hedging.box(pool.acquire, "box") as box:
                assert box == 61
        else:
            with pytest.raises(ClassifiedFailure):
                async with hedging.box(pool.acquire, "box"):
                    pass
        await settle()
        assert pool.alive == set()

    asyncio.run(scene())


def test_whoever_gives_up_waiting_leaves_no_box_behind():
    async def scene():
        pool, hedging = await warmed()
        pool.stuck = {60: asyncio.Event(), 61: asyncio.Event()}
        hedged = asyncio.Event()
        hedging.on_hedged = lambda call, after_s: hedged.set()

        async def ask():
            async with hedging.box(pool.acquire, "box"):
                raise AssertionError("it never came")

        task = asyncio.create_task(ask())
        await hedged.wait()
        await settle()
        assert pool.num_asked == 62
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        for event in pool.stuck.values():
            event.set()
        await settle()
        assert pool.alive == set()

    asyncio.run(scene())


def test_what_fails_in_a_box_is_seen_by_its_user_and_the_box_is_given_back():
    async def scene():
        pool, hedging = await warmed()
        with pytest.raises(ZeroDivisionError):
            async with hedging.box(pool.acquire, "box"):
                raise ZeroDivisionError
        assert pool.alive == set()

    asyncio.run(scene())


@pytest.mark.parametrize("hedged", [False, True])
def test_the_time_for_which_a_group_holds_boxes_is_counted(hedged):
    async def scene():
        clock, held = ManualClock(), []
        hedging = BoxHedging(clock) if hedged else None
        pool = GroupPool(Pool(), clock, hedging, held.append)
        async with pool.acquire("image"):
            clock.advance(3.0)
        assert held == [3.0]

    asyncio.run(scene())
