"""Streams, pauses, sleep and weights in flight, through the engine's thread."""

import asyncio
import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from burnish.core.clock import ManualClock
from burnish.core.errors import ClassifiedFailure, UserError
from burnish.core.records import GenerateRequest, Generation, GenerationDelta
from burnish.core.vocabulary import EngineFeature, FailureKind, InFlight, SleepLevel, StopReason
from burnish.model.decoder import Decoder
from burnish.rollout.engine.engine import EngineCore
from burnish.rollout.engine.limits import CoreLimits
from burnish.rollout.engine.weights import ServedModel
from burnish.rollout.engine.worker import EngineWorker

Ask = Callable[..., GenerateRequest]
LIMITS = CoreLimits(num_pages=120, page_size=4, budget_tokens=64)
DEADLINE_S = 60.0
TOLERANCE = 1e-4


def play(decoder: Decoder, scenario: Any, **options: Any) -> Any:
    async def main() -> Any:
        values = {"limits": LIMITS, "dtype": torch.float32, "num_threads": 1} | options
        worker = EngineWorker(decoder.config, decoder.state_dict(), **values)
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


def test_a_stream_delivers_every_token_once_and_the_whole_at_the_end(
    decoder: Decoder, request_for: Ask
) -> None:
    request = request_for("a", [1, 2, 3], max_tokens=9, num_top_logprobs=2)

    async def scenario(worker: EngineWorker) -> None:
        whole = await worker.generate(request)
        deltas: list[GenerationDelta] = [delta async for delta in worker.stream(request)]
        assert [d.generation is None for d in deltas] == [True] * (len(deltas) - 1) + [False]
        for field in ("token_ids", "logprobs", "weight_versions", "top_logprobs"):
            joined = tuple(item for delta in deltas for item in getattr(delta, field))
            assert joined == getattr(deltas[-1].generation, field)
        assert deltas[-1].generation.token_ids == whole.token_ids
        assert len(deltas) > 1
        assert worker.stats().num_outstanding == 0

    play(decoder, scenario)


def test_closing_a_stream_aborts_the_request(
    decoder: Decoder, request_for: Ask, make_gate: Any
) -> None:
    gate = make_gate(4)

    async def scenario(worker: EngineWorker) -> None:
        stream = worker.stream(request_for("a", [1, 2], max_tokens=200))
        first = await anext(stream)
        assert first.token_ids
        await gate.wait()
        await stream.aclose()
        gate.go.set()
        await worker.generate(request_for("a", [5], max_tokens=1))
        assert worker.stats().sampled_tokens < 20
        assert worker.stats().free_pages == LIMITS.num_pages

    play(decoder, scenario)


def test_a_refused_or_broken_stream_raises_what_generate_raises(
    decoder: Decoder, request_for: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(worker: EngineWorker) -> None:
        with pytest.raises(UserError, match="empty"):
            await anext(worker.stream(request_for("a", [])))
        monkeypatch.setattr(ServedModel, "logits", lambda self, x: x.new_full((len(x), 300), nan))
        with pytest.raises(ClassifiedFailure, match="not finite") as caught:
            async for _ in worker.stream(request_for("a", [1])):
                pass
        assert caught.value.failure.kind is FailureKind.INFRA
        with pytest.raises(ClassifiedFailure, match="not finite"):
            await worker.generate(request_for("a", [1]))
        monkeypatch.undo()
        assert len((await worker.generate(request_for("a", [1], max_tokens=3))).token_ids) == 3

    nan = float("nan")
    play(decoder, scenario)


def test_a_paused_engine_takes_requests_and_answers_after_resume(
    decoder: Decoder, request_for: Ask
) -> None:
    async def scenario(worker: EngineWorker) -> None:
        await worker.pause()
        await worker.pause()
        asked = asyncio.ensure_future(worker.generate(request_for("a", [1], max_tokens=3)))
        # A score passes through the same thread, so a step had its chance before it.
        await worker.score((1, 2))
        assert not asked.done()
        assert worker.stats().sampled_tokens == 0
        await worker.resume()
        assert len((await asked).token_ids) == 3

    play(decoder, scenario)


@pytest.mark.parametrize("level", SleepLevel)
def test_sleep_gives_memory_back_and_loses_no_token(
    decoder: Decoder, request_for: Ask, make_gate: Any, level: SleepLevel
) -> None:
    request = request_for("a", range(9), max_tokens=30, seed=4)
    expected = play(decoder, lambda worker: worker.generate(request))
    gate = make_gate(10)

    async def scenario(worker: EngineWorker) -> None:
        running = asyncio.ensure_future(worker.generate(request))
        await gate.wait()
        asleep = asyncio.ensure_future(worker.sleep(level))
        await packed(worker)
        gate.go.set()
        await asleep
        assert worker._core._cache is None
        assert worker._core.free_pages == LIMITS.num_pages
        assert (worker._core._served is None) == (level is SleepLevel.WEIGHTS)
        with pytest.raises(UserError, match="sleeps"):
            await worker.resume()
        assert not running.done()
        await worker.wake(decoder.state_dict() if level is SleepLevel.WEIGHTS else None)
        got = await running
        assert got.token_ids == expected.token_ids
        assert got.logprobs == pytest.approx(expected.logprobs, abs=TOLERANCE)

    play(decoder, scenario)


def test_waking_with_other_weights_or_none_is_refused(make_decoder: Any, request_for: Ask) -> None:
    decoder = make_decoder()
    stale = {k: v.clone() for k, v in decoder.state_dict().items()}
    name = "blocks.1.down.weight"
    # Two values change places: neither sum nor extremes tell.
    stale[name][0, 0], stale[name][3, 5] = stale[name][3, 5].clone(), stale[name][0, 0].clone()

    async def scenario(worker: EngineWorker) -> None:
        before = await worker.score(range(20))
        await worker.sleep(SleepLevel.WEIGHTS)
        with pytest.raises(UserError, match="weights"):
            await worker.score((1, 2))
        for state in (stale, make_decoder(seed=1).state_dict()):
            with pytest.raises(UserError, match="not those of version 0"):
                await worker.wake(state)
        with pytest.raises(UserError, match="gave its weights back"):
            await worker.wake()
        await worker.wake(decoder.state_dict())
        assert await worker.score(range(20)) == before
        # New weights may come instead of the old ones.
        await worker.sleep(SleepLevel.WEIGHTS)
        await worker.update_weights(make_decoder(seed=1).state_dict(), 1)
        await worker.wake()
        assert await worker.score(range(20)) != before
        got = await worker.generate(request_for("a", [1], max_tokens=2))
        assert got.weight_versions == (1, 1)

    play(decoder, scenario)


@pytest.mark.parametrize("inflight", InFlight)
def test_an_update_keeps_recomputes_or_aborts_what_runs(
    make_decoder: Any,
    request_for: Ask,
    make_gate: Any,
    dense_logprobs: Any,
    inflight: InFlight,
) -> None:
    old, new = make_decoder(seed=0), make_decoder(seed=1)
    gate = make_gate(5)

    async def scenario(worker: EngineWorker) -> Generation:
        running = asyncio.ensure_future(worker.generate(request_for("a", range(9), max_tokens=12)))
        await gate.wait()
        update = asyncio.ensure_future(worker.update_weights(new.state_dict(), 3, inflight))
        await packed(worker)
        gate.go.set()
        await update
        return await running

    got = play(old, scenario)
    if inflight is InFlight.ABORT:
        assert got.stop_reason is StopReason.ABORTED
        assert got.weight_versions == (0,) * 5
        return
    assert got.weight_versions == (0,) * 5 + (3,) * 7
    reference = dense_logprobs(new, [*range(9), *got.token_ids])
    exact = [float(reference[8 + i, t]) for i, t in enumerate(got.token_ids)]
    is_exact = got.logprobs[5:] == pytest.approx(exact[5:], abs=TOLERANCE)
    assert is_exact == (inflight is InFlight.RECOMPUTE)


@pytest.mark.parametrize("inflight", InFlight)
def test_updates_under_traffic_from_many_threads(
    make_decoder: Any, request_for: Ask, dense_logprobs: Any, inflight: InFlight
) -> None:
    versions = [make_decoder(seed=seed) for seed in range(5)]
    worker = EngineWorker(
        versions[0].config,
        versions[0].state_dict(),
        limits=LIMITS._replace(num_pages=40),
        dtype=torch.float32,
        num_threads=1,
    )
    results: dict[str, tuple[GenerateRequest, Generation]] = {}
    errors: list[BaseException] = []
    is_over = threading.Event()

    def client(number: int) -> None:
        rng = random.Random(number)

        async def main() -> None:
            turn = 0
            while not is_over.is_set() or turn == 0:
                prompt = [rng.randrange(3), *range(20, 20 + rng.randrange(1, 12))]
                name = f"{number}/{turn}"
                request = request_for(name, prompt, max_tokens=rng.randrange(1, 20), seed=turn)
                results[name] = (request, await worker.generate(request))
                turn += 1

        try:
            asyncio.run(main())
        except BaseException as error:  # noqa: BLE001 - shown by the test below
            errors.append(error)

    threads = [threading.Thread(target=client, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()

    async def publish() -> None:
        for version in range(1, 5):
            await worker.update_weights(versions[version].state_dict(), version, inflight)
        is_over.set()

    asyncio.run(publish())
    for thread in threads:
        thread.join(DEADLINE_S)
    worker._core.check()
    assert worker.stats().free_pages == 40
    asyncio.run(worker.close())
    assert not errors
    for request, got in results.values():
        assert list(got.weight_versions) == sorted(got.weight_versions)
        if inflight is InFlight.KEEP and len(set(got.weight_versions)) > 1:
            continue
        ids = [*request.prompt_ids, *got.token_ids]
        rows = {v: dense_logprobs(versions[v], ids) for v in set(got.weight_versions)}
        for i, token in enumerate(got.token_ids):
            row = rows[got.weight_versions[i]][len(request.prompt_ids) - 1 + i]
            assert got.logprobs[i] == pytest.approx(float(row[token]), abs=TOLERANCE)


def test_capabilities_say_what_works(decoder: Decoder) -> None:
    async def scenario(worker: EngineWorker) -> None:
        able = worker.capabilities
        assert EngineFeature.STOP_STRINGS not in able.features
        assert EngineFeature.STREAM in able.features
        assert able.max_context_tokens == decoder.config.max_position_embeddings

    play(decoder, scenario)


def test_latencies_are_those_of_the_injected_clock(
    decoder: Decoder, request_for: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, real = ManualClock(), EngineCore.step

    def step(core: EngineCore) -> Any:
        if core.has_work:
            clock.advance(0.5)
        return real(core)

    monkeypatch.setattr(EngineCore, "step", step)

    async def scenario(worker: EngineWorker) -> None:
        got = await worker.generate(request_for("a", [1, 2, 3], max_tokens=5))
        assert (got.queued_s, got.first_token_s) == (0.0, 0.5)
        stats = worker.stats()
        assert (stats.first_token.num, stats.first_token.sum_s) == (1, 0.5)
        assert (stats.inter_token.num, stats.inter_token.sum_s) == (4, 2.0)
        assert stats.queue.num == 1
        assert stats.used_page_ratio == 0.0
        assert stats.prefix_hit_ratio == 0.0
        assert stats.num_waiting == stats.saved_bytes == 0

    play(decoder, scenario, clock=clock)
