"""Four thousand requests at once on one small engine."""

import asyncio
import math
import random
import sys
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from burnish.core.clock import ManualClock
from burnish.core.records import GenerateRequest, Generation
from burnish.core.vocabulary import StopReason
from burnish.model.decoder import Decoder
from burnish.rollout.engine.engine import EngineCore
from burnish.rollout.engine.histogram import BOUNDS_S
from burnish.rollout.engine.limits import CoreLimits
from burnish.rollout.engine.stats import EngineStats
from burnish.rollout.engine.worker import EngineWorker

Ask = Callable[..., GenerateRequest]
NUM, LEVELS, RUNNING, PAGES = 4000, 4, 48, 400
DEADLINE_S = 500.0


class Fate(NamedTuple):
    """What is to become of a request."""

    num_tokens: int
    streams: bool
    cancelled_early: bool
    cancelled_late: bool


def fates() -> list[Fate]:
    rng = random.Random(0)
    found = []
    for _ in range(NUM):
        lot = rng.random()
        found.append(Fate(rng.randint(1, 9), rng.random() < 0.1, lot < 1 / 6, 1 / 6 <= lot < 1 / 3))
    return found


def own_bytes() -> int:
    """Memory of this process without the files that it has mapped."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) * 1024


async def streamed(worker: EngineWorker, request: GenerateRequest) -> Generation:
    """The whole of a stream, every token of which came once."""
    tokens: list[int] = []
    whole = None
    async with aclosing(worker.stream(request)) as deltas:
        async for delta in deltas:
            tokens += delta.token_ids
            whole = delta.generation
    assert whole is not None
    assert whole.token_ids == tuple(tokens)
    return whole


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
def test_thousands_wait_in_order_of_priority_and_none_is_lost(
    decoder: Decoder, request_for: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, real = ManualClock(), EngineCore.step
    lots = fates()

    def step(core: EngineCore) -> Any:
        # A step takes a second, so that times tell steps.
        clock.advance(1.0)
        assert core.num_running <= RUNNING
        core.check()
        return real(core)

    monkeypatch.setattr(EngineCore, "step", step)
    worker = EngineWorker(
        decoder.config,
        decoder.state_dict(),
        dtype=torch.float32,
        # Ageing beyond the run: priority alone decides.
        limits=CoreLimits(
            num_pages=PAGES,
            page_size=4,
            max_running=RUNNING,
            ageing_steps=10**6,
            swap_bytes=1 << 20,
        ),
        max_outstanding=NUM,
        num_threads=1,
        clock=clock,
    )

    def start(number: int) -> asyncio.Task[Generation]:
        prompt = [number % 300, number // 300, *range(3 + number % 5)]
        request = request_for(f"{number}", prompt, max_tokens=lots[number].num_tokens, seed=number)
        values = {name: getattr(request, name) for name in ("request_id", "prompt_ids", "params")}
        request = GenerateRequest(**values, priority=number % LEVELS)
        ask = streamed if lots[number].streams else EngineWorker.generate
        return asyncio.ensure_future(ask(worker, request))

    async def main() -> tuple[list[asyncio.Task[Generation]], EngineStats, int]:
        await worker.pause()
        tasks = [start(number) for number in range(NUM)]
        await asyncio.sleep(0)
        while worker.stats().num_outstanding < NUM:  # noqa: ASYNC110 - a state of another thread
            await asyncio.sleep(0)
        for task, lot in zip(tasks, lots, strict=True):
            if lot.cancelled_early:
                task.cancel()
        await worker.resume()
        # Later ones at whatever moment the first of each fifty before them ends.
        for number in range(LEVELS - 1, NUM, 50):
            await asyncio.wait([tasks[number]])
            for other in range(number, min(number + 50, NUM)):
                if lots[other].cancelled_late:
                    tasks[other].cancel()
        await asyncio.wait(tasks)
        stats, before = worker.stats(), own_bytes()
        # As many again leave nothing behind: what the first needed was enough.
        again = [start(number) for number in range(NUM)]
        await asyncio.wait(again)
        return tasks, stats, own_bytes() - before

    tasks, stats, grown = asyncio.run(asyncio.wait_for(main(), DEADLINE_S))
    asyncio.run(worker.close())

    answered: dict[int, Generation] = {}
    for number, (task, lot) in enumerate(zip(tasks, lots, strict=True)):
        if task.cancelled():
            assert lot.cancelled_early or lot.cancelled_late
            continue
        answered[number] = task.result()
        assert answered[number].request_id == f"{number}"
        assert not lot.cancelled_early
        assert answered[number].stop_reason is StopReason.LENGTH
        assert len(answered[number].token_ids) == lot.num_tokens
    assert NUM / 2 < len(answered) < NUM
    assert (stats.num_outstanding, stats.num_waiting, stats.num_running) == (0, 0, 0)
    assert (stats.free_pages, stats.saved_bytes, stats.num_failed) == (PAGES, 0, 0)
    # Answers that this test keeps are some 5 KB each.
    assert grown < 64 << 20

    # All arrived before the first step: how long one waited says in which step it began.
    begun = {
        level: [g.queued_s for n, g in answered.items() if n % LEVELS == level]
        for level in range(LEVELS)
    }
    for level in range(1, LEVELS):
        assert max(begun[level]) <= min(begun[level - 1])
    for waits in begun.values():
        assert waits == sorted(waits)

    # The histogram tells of all that began, those that were cancelled while they ran included.
    assert len(answered) < stats.queue.num <= NUM
    waits = sorted(g.queued_s for g in answered.values())
    exact = waits[math.ceil(0.99 * len(waits)) - 1]
    ratio = BOUNDS_S[1] / BOUNDS_S[0]
    assert exact / ratio <= stats.queue.quantile_s(0.99) <= exact * ratio
