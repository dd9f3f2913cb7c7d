"""Adapters and draft models through the worker: from any event loop, beside running requests."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest
import torch

from burnish.core.errors import ClassifiedFailure, UserError
from burnish.core.records import GenerateRequest, Generation
from burnish.core.vocabulary import InFlight, NoDraft, SleepLevel, Speculation, StopReason
from burnish.model.config import ModelConfig
from burnish.model.decoder import Decoder
from burnish.model.lora import Lora, LowRank, merged
from burnish.rollout.engine.limits import CoreLimits, SpeculationLimits
from burnish.rollout.engine.speculation.lengths import Prices
from burnish.rollout.engine.speculation.opening import DraftSource
from burnish.rollout.engine.worker import EngineWorker

Ask = Callable[..., GenerateRequest]
Build = Callable[..., Decoder]
DEADLINE_S = 30.0
PROMPT = [(7 * i * i + 3 * i) % 300 for i in range(21)]
LOOP = [3, 5, 7, 11] * 6


def lora(config: ModelConfig, seed: int) -> Lora:
    """Rank 2 on what attention reads, in every layer."""
    generator = torch.Generator().manual_seed(seed)
    rows = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    return Lora(
        tuple(
            {
                "qkv": LowRank(
                    0.2 * torch.randn(2, config.hidden_size, generator=generator),
                    0.2 * torch.randn(rows, 2, generator=generator),
                )
            }
            for _ in range(config.num_layers)
        )
    )


def through(request: GenerateRequest, name: str) -> GenerateRequest:
    return msgspec.structs.replace(request, adapter=name)


def worker_for(
    decoder: Decoder,
    *,
    state: Any = None,
    dtype: torch.dtype = torch.float32,
    speculation: SpeculationLimits | None = None,
    draft: Decoder | None = None,
) -> EngineWorker:
    return EngineWorker(
        decoder.config,
        state or decoder.state_dict(),
        dtype=dtype,
        limits=CoreLimits(
            num_pages=100, page_size=4, speculation=speculation or SpeculationLimits()
        ),
        draft=None if draft is None else DraftSource(draft.config, draft.state_dict()),
        num_threads=1,
    )


def play(worker: EngineWorker, scenario: Callable[[EngineWorker], Awaitable[Any]]) -> Any:
    async def main() -> Any:
        try:
            result = await scenario(worker)
            stats = worker.stats()
            assert (stats.num_outstanding, stats.free_pages) == (0, stats.num_pages)
            return result
        finally:
            await worker.close()

    return asyncio.run(asyncio.wait_for(main(), DEADLINE_S))


async def called(worker: EngineWorker, num_calls: int) -> None:
    """Wait until calls have reached the thread, which stands at a gate."""
    while len(worker._loop._calls) < num_calls:  # noqa: ASYNC110 - a state of another thread
        await asyncio.sleep(0)


def test_an_adapter_gives_what_merged_weights_give_and_leaves_others_alone(
    decoder: Decoder, request_for: Ask
) -> None:
    tutor = lora(decoder.config, 1)
    plain = request_for("plain", PROMPT, max_tokens=16, temperature=0.8, seed=5)
    adapted = through(msgspec.structs.replace(plain, request_id="adapted"), "tutor")

    async def mixed(worker: EngineWorker) -> tuple[Generation, Generation]:
        await worker.add_adapter("tutor", tutor, version=3)
        assert worker.adapters == ("tutor",)
        one, other = await asyncio.gather(worker.generate(plain), worker.generate(adapted))
        return one, other

    base, tuned = play(worker_for(decoder), mixed)
    alone = play(worker_for(decoder), lambda w: w.generate(plain))
    state = merged(decoder.state_dict(), tutor)
    wanted = play(worker_for(decoder, state=state), lambda w: w.generate(plain))
    assert base.token_ids == alone.token_ids
    assert tuned.token_ids == wanted.token_ids != base.token_ids
    assert tuned.weight_versions == (3,) * 16
    assert base.weight_versions == (0,) * 16


@pytest.mark.parametrize("inflight", list(InFlight))
def test_new_weights_of_an_adapter_reach_a_running_request_as_the_policy_says(
    inflight: InFlight, decoder: Decoder, request_for: Ask, make_gate: Any
) -> None:
    gate = make_gate(4)

    async def scenario(worker: EngineWorker) -> Generation:
        await worker.add_adapter("tutor", lora(decoder.config, 1))
        request = through(request_for("a", PROMPT, max_tokens=12), "tutor")
        task = asyncio.create_task(worker.generate(request))
        await gate.wait()
        newer = lora(decoder.config, 2)
        update = asyncio.create_task(worker.add_adapter("tutor", newer, 7, inflight))
        await called(worker, 1)
        gate.go.set()
        await update
        return await task

    got = play(worker_for(decoder), scenario)
    if inflight is InFlight.ABORT:
        assert got.stop_reason is StopReason.ABORTED
        assert got.weight_versions == (0,) * 4
    else:
        assert got.weight_versions == (0,) * 4 + (7,) * 8


def test_a_request_whose_adapter_goes_before_it_starts_is_refused_alone(
    decoder: Decoder, request_for: Ask, make_gate: Any
) -> None:
    """It was valid when it was submitted; the thread finds out between two steps."""
    gate = make_gate(2)
    beside = request_for("beside", PROMPT, max_tokens=12)

    async def scenario(worker: EngineWorker) -> Generation:
        await worker.add_adapter("tutor", lora(decoder.config, 1))
        running = asyncio.create_task(worker.generate(beside))
        await gate.wait()
        late = through(request_for("late", PROMPT, max_tokens=12), "tutor")
        waiting = asyncio.create_task(worker.generate(late))
        deltas = worker.stream(msgspec.structs.replace(late, request_id="stream"))
        streaming = asyncio.create_task(anext(deltas))
        removal = asyncio.create_task(worker.remove_adapter("tutor"))
        await called(worker, 1)
        gate.go.set()
        await removal
        for task in (waiting, streaming):
            with pytest.raises(UserError, match="knows no adapter 'tutor'"):
                await task
        # The id is free again.
        await worker.generate(request_for("late", PROMPT, max_tokens=1))
        return await running

    got = play(worker_for(decoder), scenario)
    assert got.token_ids == play(worker_for(decoder), lambda w: w.generate(beside)).token_ids


def test_removing_an_adapter_ends_its_running_requests_and_its_pins(
    decoder: Decoder, request_for: Ask, make_gate: Any
) -> None:
    gate = make_gate(3)

    async def scenario(worker: EngineWorker) -> Generation:
        await worker.add_adapter("tutor", lora(decoder.config, 1))
        await worker.pin(tuple(PROMPT), "tutor")
        request = through(request_for("a", PROMPT, max_tokens=12), "tutor")
        task = asyncio.create_task(worker.generate(request))
        await gate.wait()
        removal = asyncio.create_task(worker.remove_adapter("tutor"))
        await called(worker, 1)
        gate.go.set()
        await removal
        assert worker.adapters == ()
        with pytest.raises(UserError, match="knows no adapter 'tutor'"):
            await worker.remove_adapter("tutor")
        return await task

    got = play(worker_for(decoder), scenario)
    assert got.stop_reason is StopReason.ABORTED
    assert len(got.token_ids) == 3


def spoiled(adapter: Lora, layer: int, **halves: torch.Tensor) -> Lora:
    changed = dict(adapter.layers[layer])
    changed["qkv"] = changed["qkv"]._replace(**halves)
    return Lora((*adapter.layers[:layer], changed, *adapter.layers[layer + 1 :]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_adapter_of_another_shape_or_of_no_numbers_is_refused(
    dtype: torch.dtype, decoder: Decoder, make_decoder: Build, request_for: Ask
) -> None:
    """Unchecked, a native product would read behind the end of its rows."""
    good, nan = lora(decoder.config, 1), float("nan")
    wider = lora(make_decoder(hidden_size=96).config, 1)
    bad: dict[str, tuple[Any, str]] = {
        "wide": (wider, r"\(2, 96\) where \(2, 64\) fits"),
        "deep": (lora(make_decoder(num_layers=5).config, 1), "5 layers, the model 3"),
        "flat": (lora(make_decoder(num_layers=1).config, 1), "1 layers, the model 3"),
        "nan": (spoiled(good, 1, up_OR=good.layers[1]["qkv"].up_OR * nan), "not finite"),
        "ranks": (spoiled(good, 2, up_OR=torch.zeros(160, 3)), r"\(160, 3\)"),
        "empty": (spoiled(good, 0, down_RI=torch.zeros(0, 64)), "rank 0"),
        "name": (Lora(({"head": good.layers[0]["qkv"]},) * 3), "no matrix head"),
    }

    async def scenario(worker: EngineWorker) -> None:
        for name, (adapter, message) in bad.items():
            with pytest.raises(UserError, match=message):
                await worker.add_adapter(name, adapter)
        with pytest.raises(UserError, match="name is empty"):
            await worker.add_adapter("", good)
        for name, version in ((5, 0), ("tutor", "1")):
            with pytest.raises(UserError, match=f"{name if name == 5 else version}"):
                await worker.add_adapter(name, good, version)  # type: ignore[arg-type]
        with pytest.raises(ClassifiedFailure, match="packing an adapter"):
            await worker.add_adapter("none", None)  # type: ignore[arg-type]
        assert worker.adapters == ()
        await worker.generate(request_for("a", PROMPT, max_tokens=4))

    play(worker_for(decoder, dtype=dtype), scenario)


def test_a_stale_draft_model_guesses_again_with_new_weights_and_refuses_bad_ones(
    decoder: Decoder, make_decoder: Build, request_for: Ask
) -> None:
    newer = make_decoder(seed=1)
    guesses = SpeculationLimits(kind=Speculation.DRAFT, max_tokens=4)

    async def scenario(worker: EngineWorker) -> tuple[int, int, Generation]:
        await worker.update_weights(newer.state_dict(), 1)
        stale = await worker.generate(request_for("stale", LOOP, max_tokens=20))
        without = worker.stats()
        assert dict(without.undrafted)[NoDraft.STALE] > 0
        with pytest.raises(UserError, match="has shape"):
            await worker.update_draft(make_decoder(hidden_size=32, head_dim=8).state_dict())
        broken = {name: value * float("nan") for name, value in newer.state_dict().items()}
        for state in (broken, {}, None):
            with pytest.raises(UserError):
                await worker.update_draft(state)  # type: ignore[arg-type]
        await worker.generate(request_for("still", LOOP, max_tokens=20))
        assert worker.stats().drafted_tokens == without.drafted_tokens
        await worker.update_draft(newer.state_dict())
        got = await worker.generate(request_for("fresh", LOOP, max_tokens=20))
        assert got.token_ids == stale.token_ids
        return without.drafted_tokens, worker.stats().drafted_tokens, got

    worker = worker_for(decoder, speculation=guesses, draft=make_decoder(seed=2))
    speculator = worker._core._speculator
    assert speculator is not None
    # Guess always: whether it pays is tested apart.
    speculator._prices = lambda *_: Prices(1.0, 1e-9)  # type: ignore[method-assign]
    before, after, got = play(worker, scenario)
    assert after > before
    assert got.weight_versions == (1,) * 20


def test_adapters_and_guesses_outlive_sleep(decoder: Decoder, request_for: Ask) -> None:
    guesses = SpeculationLimits(kind=Speculation.SELF, max_tokens=3, num_layers=1)
    request = through(request_for("a", LOOP, max_tokens=16), "tutor")

    async def scenario(worker: EngineWorker) -> tuple[Generation, Generation]:
        await worker.add_adapter("tutor", lora(decoder.config, 1))
        first = await worker.generate(request)
        await worker.sleep(SleepLevel.WEIGHTS)
        with pytest.raises(UserError, match="sleeps without weights"):
            await worker.add_adapter("other", lora(decoder.config, 2))
        await worker.wake(decoder.state_dict())
        return first, await worker.generate(request)

    first, second = play(worker_for(decoder, speculation=guesses), scenario)
    assert first.token_ids == second.token_ids
