"""The engine's thread: answers, cancels, swaps weights, dies loudly, never hangs."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from burnish.core.clock import ManualClock
from burnish.core.errors import ClassifiedFailure, UserError
from burnish.core.records import GenerateRequest
from burnish.core.vocabulary import FailureKind, StopReason
from burnish.model.decoder import Decoder
from burnish.rollout.engine.engine import EngineCore
from burnish.rollout.engine.limits import CoreLimits
from burnish.rollout.engine.scheduler import Scheduler
from burnish.rollout.engine.worker import EngineWorker

Ask = Callable[..., GenerateRequest]
LIMITS = CoreLimits(num_pages=120, page_size=4)
DEADLINE_S = 60.0


def start(decoder: Decoder, **options: Any) -> EngineWorker:
    values = {"limits": LIMITS, "dtype": torch.float32, "num_threads": 1} | options
    return EngineWorker(decoder.config, decoder.state_dict(), **values)


def play(decoder: Decoder, scenario: Any, **options: Any) -> Any:
    async def main() -> Any:
        worker = start(decoder, **options)
        try:
            async with asyncio.timeout(DEADLINE_S):
                return await scenario(worker)
        finally:
            await worker.close()

    return asyncio.run(main())


async def packed(worker: EngineWorker) -> None:
    """Until an update that runs beside a held step has only the swap before it."""
    while not worker._loop._calls:  # noqa: ASYNC110 - what is waited for sets no event
        await asyncio.sleep(0)


def test_concurrent_requests_equal_the_core(decoder: Decoder, request_for: Ask) -> None:
    requests = [request_for(f"r{i}", [i, 9, 8], max_tokens=9, seed=i) for i in range(8)]

    async def scenario(worker: EngineWorker) -> Any:
        return await asyncio.gather(*(worker.generate(r) for r in requests))

    got = play(decoder, scenario)
    core = EngineCore(decoder.config, decoder.state_dict(), dtype=torch.float32, limits=LIMITS)
    for request in requests:
        core.add(request)
    want = {}
    while core.has_work:
        want |= {g.request_id: g.token_ids for _, g in core.step()}
    assert {g.request_id: g.token_ids for g in got} == want


def test_many_event_loops_share_one_engine(decoder: Decoder, request_for: Ask) -> None:
    worker = start(decoder)
    results: dict[int, int] = {}

    def loop(i: int) -> None:
        request = request_for(f"r{i}", [i], max_tokens=5)
        results[i] = len(asyncio.run(worker.generate(request)).token_ids)

    threads = [threading.Thread(target=loop, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    asyncio.run(worker.close())
    assert results == dict.fromkeys(range(6), 5)


def test_weights_change_between_two_steps_of_a_running_request(
    make_decoder: Any, request_for: Ask, make_gate: Any
) -> None:
    old, new = make_decoder(seed=0), make_decoder(seed=1)
    gate = make_gate(3)

    async def scenario(worker: EngineWorker) -> None:
        running = asyncio.ensure_future(worker.generate(request_for("a", [1, 2], max_tokens=10)))
        await gate.wait()
        update = asyncio.ensure_future(worker.update_weights(new.state_dict(), 7))
        await packed(worker)
        gate.go.set()
        await update
        assert worker.weight_version == 7
        assert (await running).weight_versions == (0, 0, 0, *(7,) * 7)
        late = await worker.generate(request_for("b", [1, 2], max_tokens=2))
        assert late.weight_versions == (7, 7)

    play(old, scenario)


def test_a_refused_update_reaches_its_caller_and_nobody_else(
    decoder: Decoder, request_for: Ask
) -> None:
    async def scenario(worker: EngineWorker) -> None:
        with pytest.raises(UserError, match="missing"):
            await worker.update_weights({}, 1)
        assert len((await worker.generate(request_for("a", [1]))).token_ids) == 64

    play(decoder, scenario)


def test_cancelling_frees_the_pages(decoder: Decoder, request_for: Ask, make_gate: Any) -> None:
    gate = make_gate(3)

    async def scenario(worker: EngineWorker) -> None:
        doomed = asyncio.ensure_future(worker.generate(request_for("a", [1, 2], max_tokens=200)))
        other = asyncio.ensure_future(worker.generate(request_for("b", [3], max_tokens=9)))
        await gate.wait()
        doomed.cancel()
        with pytest.raises(asyncio.CancelledError):
            await doomed
        gate.go.set()
        assert len((await other).token_ids) == 9
        again = await worker.generate(request_for("a", [1, 2], max_tokens=3))
        assert len(again.token_ids) == 3
        stats = worker.stats()
        assert stats.num_outstanding == stats.num_running == 0
        assert stats.free_pages == stats.num_pages
        # The cancelled request stopped early.
        assert stats.sampled_tokens < 100

    play(decoder, scenario)


@pytest.mark.parametrize("error", [RuntimeError("boom"), MemoryError(), KeyError("page")])
def test_a_raising_step_fails_everything_pending_and_all_that_follows(
    decoder: Decoder,
    request_for: Ask,
    monkeypatch: pytest.MonkeyPatch,
    make_gate: Any,
    error: Exception,
) -> None:
    gate = make_gate(2)

    async def scenario(worker: EngineWorker) -> None:
        asked = [
            asyncio.ensure_future(worker.generate(request_for(f"r{i}", [i + 1]))) for i in range(3)
        ]
        await gate.wait()

        def broken(scheduler: Scheduler) -> None:
            raise error

        monkeypatch.setattr(Scheduler, "next_work", broken)
        scored = asyncio.ensure_future(worker.score((1, 2)))
        asked.append(asyncio.ensure_future(worker.generate(request_for("late", [1]))))
        await asyncio.sleep(0)
        gate.go.set()
        for result in await asyncio.gather(*asked, return_exceptions=True):
            assert isinstance(result, ClassifiedFailure)
            assert result.failure.kind is FailureKind.INFRA
            assert type(error).__name__ in result.failure.message
        (score,) = await asyncio.gather(scored, return_exceptions=True)
        assert isinstance(score, ClassifiedFailure | tuple)
        with pytest.raises(ClassifiedFailure):
            await worker.generate(request_for("after", [1]))
        with pytest.raises(ClassifiedFailure):
            await worker.score((1, 2))

    play(decoder, scenario)


def test_a_load_that_breaks_half_way_leaves_the_old_weights(
    make_decoder: Any, request_for: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = request_for("a", [1], max_tokens=5)

    async def scenario(worker: EngineWorker) -> None:
        before = await worker.generate(request)

        def broken(*_: Any) -> None:
            raise MemoryError

        with monkeypatch.context() as patch:
            patch.setattr("burnish.rollout.engine.weights._fill_block", broken)
            with pytest.raises(ClassifiedFailure, match="MemoryError"):
                await worker.update_weights(make_decoder(seed=1).state_dict(), 1)
        assert worker.weight_version == 0
        assert (await worker.generate(request)).logprobs == before.logprobs

    play(make_decoder(), scenario)


def test_closing_answers_what_is_pending_as_aborted(
    decoder: Decoder, request_for: Ask, make_gate: Any
) -> None:
    gate = make_gate(3)

    async def scenario(worker: EngineWorker) -> None:
        running = asyncio.ensure_future(worker.generate(request_for("a", [1], max_tokens=200)))
        await gate.wait()
        waiting = asyncio.ensure_future(worker.generate(request_for("b", [1], max_tokens=200)))
        await asyncio.sleep(0)
        closing = asyncio.ensure_future(worker.close())
        await asyncio.sleep(0)
        gate.go.set()
        await closing
        first, second = await asyncio.gather(running, waiting)
        assert first.stop_reason is second.stop_reason is StopReason.ABORTED
        assert len(first.token_ids) == 3
        assert second.token_ids == ()
        with pytest.raises(ClassifiedFailure, match="closed"):
            await worker.generate(request_for("c", [1]))
        with pytest.raises(ClassifiedFailure, match="closed"):
            await worker.update_weights(decoder.state_dict(), 1)
        await worker.close()

    play(decoder, scenario)


def test_bad_requests_duplicates_and_overload_are_refused_at_once(
    decoder: Decoder, request_for: Ask, make_gate: Any
) -> None:
    gate = make_gate(1)

    async def scenario(worker: EngineWorker) -> None:
        with pytest.raises(UserError, match="empty"):
            await worker.generate(request_for("x", []))
        asked = [
            asyncio.ensure_future(worker.generate(request_for(f"r{i}", [i], max_tokens=2)))
            for i in range(2)
        ]
        await gate.wait()
        with pytest.raises(UserError, match="already in flight"):
            await worker.generate(request_for("r1", [5]))
        with pytest.raises(ClassifiedFailure, match="2 requests"):
            await worker.generate(request_for("r2", [5]))
        gate.go.set()
        await asyncio.gather(*asked)
        await worker.generate(request_for("r2", [5], max_tokens=1))

    play(decoder, scenario, max_outstanding=2)


def test_a_caller_whose_loop_has_gone_harms_nobody(
    decoder: Decoder, request_for: Ask, make_gate: Any
) -> None:
    gate = make_gate(2)
    worker = start(decoder)

    async def leave() -> None:
        asyncio.ensure_future(worker.generate(request_for("gone", [1], max_tokens=50)))  # noqa: RUF006
        await gate.wait()

    asyncio.run(leave())
    gate.go.set()

    async def stay() -> int:
        return len((await worker.generate(request_for("here", [2], max_tokens=4))).token_ids)

    assert asyncio.run(stay()) == 4
    asyncio.run(worker.close())


def test_stats_count_what_happened(decoder: Decoder, request_for: Ask) -> None:
    clock = ManualClock()

    async def scenario(worker: EngineWorker) -> None:
        await worker.generate(request_for("a", range(9), max_tokens=6))
        await worker.generate(request_for("b", range(9), max_tokens=6))
        clock.advance(10.0)
        stats = worker.stats()
        assert stats.sampled_tokens == 12
        assert stats.prompt_tokens == 10
        assert stats.cached_tokens == 8
        assert stats.busy_ratio == stats.tokens_per_busy_s == 0.0

    play(decoder, scenario, clock=clock)
