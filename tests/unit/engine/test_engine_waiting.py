"""The order of service: urgent first, continuing first, nobody for ever last."""

import random

from hypothesis import given
from hypothesis import strategies as st

from burnish.core.records import GenerateRequest, SamplingParams
from burnish.rollout.engine.sequence import Sequence
from burnish.rollout.engine.waiting import WaitingQueue

AGEING = 32


def sequence(name: str, priority: int = 0, session: str | None = None) -> Sequence:
    request = GenerateRequest(
        request_id=name,
        prompt_ids=(1, 2),
        params=SamplingParams(),
        priority=priority,
        session_id=session,
    )
    return Sequence(request, 8, 0)


def drain(queue: WaitingQueue) -> list[str]:
    names = []
    while (head := queue.head()) is not None:
        queue.remove(head)
        names.append(head.request.request_id)
    return names


def test_equals_are_served_in_order_of_arrival() -> None:
    queue = WaitingQueue(AGEING)
    for step, name in enumerate("abc"):
        queue.add(sequence(name), step)
    assert drain(queue) == ["a", "b", "c"]


def test_higher_priority_goes_first_until_waiting_outweighs_it() -> None:
    queue = WaitingQueue(AGEING)
    queue.add(sequence("old"), 0)
    queue.add(sequence("urgent", priority=1), AGEING - 1)
    queue.add(sequence("too late", priority=1), AGEING + 1)
    assert drain(queue) == ["urgent", "old", "too late"]


def test_a_continuing_turn_goes_before_new_episodes_of_its_priority() -> None:
    queue = WaitingQueue(AGEING)
    queue.remember_session("s")
    queue.add(sequence("new"), 0)
    queue.add(sequence("new urgent", priority=2), 0)
    queue.add(sequence("next turn", session="s"), 5)
    assert drain(queue) == ["new urgent", "next turn", "new"]
    queue.forget_sessions()
    queue.add(sequence("new"), 0)
    queue.add(sequence("unknown", session="s"), 5)
    assert drain(queue) == ["new", "unknown"]


def test_a_session_that_floods_the_queue_delays_others_by_a_few_places_only() -> None:
    queue = WaitingQueue(AGEING)
    for i in range(1000):
        queue.add(sequence(f"flood {i}", session="greedy"), 0)
    queue.add(sequence("modest", session="modest"), 3)
    assert drain(queue).index("modest") <= 3


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(-3, 3)), min_size=1, max_size=60))
def test_nobody_is_overtaken_by_what_comes_much_later(pairs: list[tuple[int, int]]) -> None:
    queue = WaitingQueue(AGEING)
    arrived: dict[str, int] = {}
    priorities: dict[str, int] = {}
    step = 0
    for i, (wait, priority) in enumerate(pairs):
        step += wait * AGEING // 2
        arrived[str(i)], priorities[str(i)] = step, priority
        queue.add(sequence(str(i), priority), step)
    order = drain(queue)
    assert sorted(order) == sorted(arrived)
    for place, name in enumerate(order):
        for earlier in order[:place]:
            levels = priorities[earlier] - priorities[name]
            assert arrived[earlier] <= arrived[name] + AGEING * max(levels, 0)


def test_random_use_loses_and_doubles_nobody() -> None:
    rng, queue = random.Random(3), WaitingQueue(AGEING)
    here: list[Sequence] = []
    away: list[Sequence] = []
    parked: dict[Sequence, list[Sequence]] = {}
    for step in range(3000):
        choice = rng.random()
        if choice < 0.35:
            new = sequence(str(step), rng.randrange(3), rng.choice([None, "x", "y"]))
            queue.add(new, step)
            here.append(new)
        elif choice < 0.5 and here:
            gone = here.pop(rng.randrange(len(here)))
            queue.remove(gone)
            away.append(gone)
            for followers in parked.values():
                if gone in followers:
                    followers.remove(gone)
        elif choice < 0.65 and away:
            back = away.pop()
            queue.push(back)
            here.append(back)
        elif choice < 0.8 and (head := queue.head()) is not None and away:
            leader = rng.choice(away)
            queue.park(head, leader, rng.randrange(10))
            parked.setdefault(leader, []).append(head)
        elif parked:
            leader = rng.choice(list(parked))
            queue.unpark(leader)
            del parked[leader]
        assert len(queue) == len(here) == len(set(queue))
        assert set(queue) == set(here)
    for leader in parked:
        queue.unpark(leader)
    assert len(drain(queue)) == len(here)
    assert not queue._backlog
