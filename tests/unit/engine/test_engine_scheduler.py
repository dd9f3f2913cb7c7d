"""Who is looked at, started, parked and preempted, without a model."""

from typing import Any

import pytest

from burnish.core.records import GenerateRequest, SamplingParams
from burnish.rollout.engine.limits import CoreLimits
from burnish.rollout.engine.residency import Residency
from burnish.rollout.engine.scheduler import Scheduler
from burnish.rollout.engine.sequence import Sequence, Token


class NoTensors:
    """A cache that notes which pages travel."""

    num_bytes_per_page = 100

    def __init__(self) -> None:
        self.loaded: list[tuple[Any, tuple[int, ...]]] = []

    def copy_page(self, source: int, target: int) -> None:
        assert source != target

    def save_pages(self, pages: Any) -> Any:
        return tuple(pages)

    def load_pages(self, saved: Any, pages: Any) -> None:
        assert len(saved) == len(pages)
        self.loaded.append((saved, tuple(pages)))

    def clear_pages(self, pages: Any) -> None:
        raise AssertionError("nothing was spoiled")


def scheduler(**sizes: int) -> Scheduler:
    limits = CoreLimits(**({"num_pages": 64, "page_size": 4, "budget_tokens": 32} | sizes))
    return Scheduler(Residency(NoTensors(), limits, version=0, flops_per_token=1e6), limits)


def sequence(name: str, prompt: Any, max_tokens: int = 8, **fields: Any) -> Sequence:
    request = GenerateRequest(
        request_id=name,
        prompt_ids=tuple(prompt),
        params=SamplingParams(max_tokens=max_tokens),
        **fields,
    )
    return Sequence(request, len(request.prompt_ids) + max_tokens, 0)


def step(core: Scheduler) -> list[str]:
    """One step; every sequence that is ready samples a token. Names of those that ended."""
    work = core.next_work()
    core.computed(work)
    ended = []
    for piece, *_ in work:
        if piece.num_pending == 0 and piece.append(Token(7, -1.0), 0) is not None:
            core.end(piece)
            ended.append(piece.request.request_id)
    core.check()
    return ended


def test_a_step_looks_at_the_head_of_the_queue_only(monkeypatch: pytest.MonkeyPatch) -> None:
    core = scheduler(max_running=4)
    for i in range(500):
        core.add(sequence(str(i), [i, i, i]))
    step(core)
    looks = []
    real = Residency.match

    def match(memory: Residency, asked: Sequence) -> Any:
        looks.append(asked)
        return real(memory, asked)

    monkeypatch.setattr(Residency, "match", match)
    for _ in range(5):
        step(core)
    assert not looks, "the batch is full: nobody needs to be looked at"
    core = scheduler(num_pages=6, page_size=4)
    core.add(sequence("big", range(16)))
    for i in range(500):
        core.add(sequence(f"r{i}", range(100 + i, 116 + i)))
    step(core)
    looks.clear()
    step(core)
    assert len(looks) == 1


def test_siblings_wait_at_the_reader_of_their_prompt_and_not_in_the_queue() -> None:
    core, prompt = scheduler(budget_tokens=8), list(range(30))
    for i in range(6):
        core.add(sequence(str(i), prompt))
    core.add(sequence("other", range(100, 104)))
    step(core)
    assert [s.request.request_id for s in core.running] == ["0", "other"]
    while len(core.running) < 7:
        step(core)
    assert [s.cached_tokens for s in core.running] == [0] + [29] * 5 + [0]


def test_who_shares_only_a_beginning_does_not_wait_for_the_rest() -> None:
    core = scheduler(budget_tokens=8, num_pages=200)
    core.add(sequence("long", range(100)))
    core.add(sequence("short", [*range(8), 200, 201]))
    for _ in range(3):
        step(core)
    long, short = sorted(core.running, key=lambda s: -s.num_prompt)
    assert long.num_pending > 1
    assert short.cached_tokens == 8


def test_an_urgent_request_starts_first_and_the_least_urgent_gives_way() -> None:
    core = scheduler(num_pages=9, budget_tokens=64)
    core.add(sequence("patient", range(12), max_tokens=20))
    step(core)
    core.add(sequence("urgent", range(50, 62), max_tokens=20, priority=1))
    order: list[str] = []
    while core.running or core.waiting:
        order += step(core)
    assert order == ["urgent", "patient"]
    assert core.num_preemptions == core.num_swaps == 1
    assert core.memory.saved_bytes == 0


def test_a_leader_that_is_given_up_frees_its_followers() -> None:
    core, prompt = scheduler(budget_tokens=4), list(range(40))
    leader = sequence("leader", prompt)
    core.add(leader)
    for i in range(3):
        core.add(sequence(str(i), prompt))
    step(core)
    assert len(core.waiting) == 3
    assert core.remove(leader)
    assert not core.remove(leader)
    done = []
    while core.running or core.waiting:
        done += step(core)
    assert sorted(done) == ["0", "1", "2"]
    assert core.memory.pool.room == 64
