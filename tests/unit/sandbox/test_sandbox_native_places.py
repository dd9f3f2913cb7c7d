import asyncio
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from burnish.core.errors import ClassifiedFailure
from burnish.sandbox.native.identities import Identities, for_root, for_user
from burnish.sandbox.native.stats import Histogram
from burnish.sandbox.places import Places


def test_first_come_first_served() -> None:
    async def main() -> list[int]:
        places, order = Places(1), []
        held = await places.take()

        async def one(number: int) -> None:
            ticket = await places.take()
            order.append(number)
            places.give_back(ticket)

        waiting = [asyncio.create_task(one(number)) for number in range(5)]
        await asyncio.sleep(0)
        assert places.num_waiting == 5
        places.give_back(held)
        await asyncio.gather(*waiting)
        assert places.num_taken == 0
        return order

    assert asyncio.run(main()) == [0, 1, 2, 3, 4]


@settings(deadline=None, max_examples=50)
@given(seed=st.integers(0, 10**6), capacity=st.integers(1, 4))
def test_cancelled_waiters_take_nothing(seed: int, capacity: int) -> None:
    dice = random.Random(seed)
    places = Places(capacity)

    async def one() -> None:
        ticket = await places.take(dice.randint(1, capacity))
        try:
            for _ in range(dice.randrange(3)):
                await asyncio.sleep(0)
        finally:
            places.give_back(ticket)

    async def main() -> None:
        tasks = [asyncio.create_task(one()) for _ in range(20)]
        for _ in range(30):
            dice.choice(tasks).cancel()
            await asyncio.sleep(0)
        await asyncio.wait(tasks)

    asyncio.run(main())
    assert (places.num_taken, places.num_waiting) == (0, 0)


def test_a_place_goes_to_a_waiter_of_another_loop() -> None:
    async def main() -> None:
        places = Places(1)
        ticket = await places.take()
        other = asyncio.create_task(asyncio.to_thread(lambda: asyncio.run(places.take())))
        for _ in range(10**6):
            if places.num_waiting:
                break
            await asyncio.sleep(0)
        places.give_back(ticket)
        places.give_back(await other)

    asyncio.run(main())


def test_more_than_there_are_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="1 to 2"):
        asyncio.run(Places(2).take(3))


def test_closing_wakes_all_who_wait() -> None:
    async def main() -> None:
        places = Places(1)
        await places.take()
        waiting = asyncio.create_task(places.take())
        await asyncio.sleep(0)
        places.close()
        with pytest.raises(ClassifiedFailure, match="closed"):
            await waiting
        with pytest.raises(ClassifiedFailure, match="closed"):
            await places.take()

    asyncio.run(main())


WHOLE = "         0          0 4294967295\n"


def test_root_gives_boxes_ids_that_own_nothing() -> None:
    ids = for_root(WHOLE, WHOLE)
    assert ids == Identities(1_900_000_000, 1_900_000_000, 65536)
    assert ids.nobody == 65534


def test_root_of_a_container_gives_the_highest_of_what_it_has() -> None:
    container = "0 100000 65536\n"
    assert for_root(container, container) == Identities(0, 0, 65536)
    large = "0 100000 200000\n"
    assert for_root(large, large) == Identities(134464, 134464, 65536)
    small = "0 1000 1\n1 100000 9\n"
    assert for_root(small, WHOLE) == Identities(1, 1_900_000_000, 9)


def test_a_user_takes_subordinate_ids() -> None:
    subuid = "other:1:1\nme:100000:65536\nme:500000:10\n"
    assert for_user(1000, 1000, "me", subuid, subuid) == Identities(100000, 100000, 65536)
    few = "1000:200000:10\n"
    assert for_user(1000, 1000, "me", few, subuid) == Identities(200000, 100000, 11)


@pytest.mark.parametrize(
    "text", ["", "me:x:y\n", "me:1\n", "other:100000:65536\n", "me:100000:0\n"]
)
def test_a_user_without_subordinate_ids_has_one(text: str) -> None:
    ids = for_user(1000, 1001, "me", text, text)
    assert ids == Identities(1000, 1001, 1)
    assert ids.nobody == 0


@given(st.lists(st.floats(2e-5, 90), min_size=1, max_size=50), st.floats(0.01, 1))
def test_a_quantile_is_right_to_within_its_class(values: list[float], level: float) -> None:
    histogram = Histogram()
    for value in values:
        histogram.add(value)
    rank = max(1, -(-int(level * len(values) * 10**9) // 10**9))
    exact = sorted(values)[min(rank, len(values)) - 1]
    found = histogram.quantile(level)
    assert found is not None
    assert any(
        value <= found * 1.0000001 and found <= value * 1.26
        for value in sorted(values)[max(0, rank - 2) : rank + 1]
    ), (exact, found)
