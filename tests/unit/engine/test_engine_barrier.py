"""Deterministic mode: batches, and so every bit, do not depend on when episodes ask."""

import asyncio
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from burnish.core.errors import ClassifiedFailure, UserError
from burnish.core.records import GenerateRequest, Generation
from burnish.model.decoder import Decoder
from burnish.rollout.engine import batch
from burnish.rollout.engine.barrier import Barrier
from burnish.rollout.engine.engine import EngineCore
from burnish.rollout.engine.limits import CoreLimits
from burnish.rollout.engine.worker import EngineWorker

Ask = Callable[..., GenerateRequest]
LIMITS = CoreLimits(num_pages=300, page_size=4)
DEADLINE_S = 60.0


async def episode(
    worker: EngineWorker, barrier: Barrier, index: int, delays: random.Random, request_for: Ask
) -> list[Generation]:
    """A few turns with random pauses; episodes have different numbers of turns."""
    tokens = [index % 3, 5, 6, 7, 8, index]
    turns = []
    try:
        for turn in range(1 + index % 3):
            for _ in range(delays.randrange(20)):
                await asyncio.sleep(0)
            request = request_for(
                f"{index:03}/{turn}", tokens, max_tokens=6, seed=100 * index + turn
            )
            turns.append(await worker.generate(request))
            tokens = [*tokens, *turns[-1].token_ids, 9]
        return turns
    finally:
        barrier.leave()


def play(
    decoder: Decoder, request_for: Ask, delay_seed: int, dtype: torch.dtype, rounds: int = 2
) -> list[list[list[Generation]]]:
    async def main() -> list[list[list[Generation]]]:
        barrier, delays = Barrier(), random.Random(delay_seed)
        worker = EngineWorker(
            decoder.config,
            decoder.state_dict(),
            dtype=dtype,
            limits=LIMITS,
            num_threads=1,
            barrier=barrier,
        )
        results = []
        async with asyncio.timeout(DEADLINE_S):
            for _ in range(rounds):
                for _ in range(9):
                    barrier.enter()
                order = list(range(9))
                delays.shuffle(order)
                tasks = {
                    i: asyncio.ensure_future(episode(worker, barrier, i, delays, request_for))
                    for i in order
                }
                results.append([await tasks[i] for i in range(9)])
        await worker.close()
        return results

    return asyncio.run(main())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_two_runs_with_other_delays_give_the_same_bits(
    decoder: Decoder, request_for: Ask, dtype: torch.dtype
) -> None:
    first = play(decoder, request_for, 1, dtype)
    assert first == play(decoder, request_for, 2, dtype)
    # A later batch of episodes owes nothing to what an earlier one left in the cache.
    assert first[0] == first[1]


def test_answers_come_in_the_order_of_request_ids(decoder: Decoder, request_for: Ask) -> None:
    order: list[str] = []

    async def ask(worker: EngineWorker, name: str, max_tokens: int) -> None:
        await worker.generate(request_for(name, [1, 2], max_tokens=max_tokens))
        order.append(name)

    async def main() -> None:
        barrier = Barrier()
        worker = EngineWorker(
            decoder.config, decoder.state_dict(), limits=LIMITS, num_threads=1, barrier=barrier
        )
        for _ in range(3):
            barrier.enter()
        async with asyncio.timeout(DEADLINE_S):
            await asyncio.gather(ask(worker, "c", 1), ask(worker, "a", 9), ask(worker, "b", 4))
        await worker.close()

    asyncio.run(main())
    assert order == ["a", "b", "c"]


def test_a_cancelled_episode_does_not_change_the_others(
    decoder: Decoder, request_for: Ask, make_gate: Any
) -> None:
    async def main(cancel: bool) -> list[Generation]:
        barrier = Barrier()
        worker = EngineWorker(
            decoder.config, decoder.state_dict(), limits=LIMITS, num_threads=1, barrier=barrier
        )
        gate = make_gate(2) if cancel else None

        async def one(name: str) -> Generation:
            try:
                return await worker.generate(request_for(name, [3, 4], max_tokens=30))
            finally:
                barrier.leave()

        async with asyncio.timeout(DEADLINE_S):
            for _ in range(3):
                barrier.enter()
            tasks = [asyncio.ensure_future(one(name)) for name in "abc"]
            if gate is not None:
                # The wave has begun when its second step does: give up one of its members.
                await gate.wait()
                tasks[0].cancel()
                gate.go.set()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            barrier.enter()
            results.append(await worker.generate(request_for("d", [3], max_tokens=2)))
            barrier.leave()
        await worker.close()
        return [r for r in results[1:] if isinstance(r, Generation)]

    assert asyncio.run(main(cancel=True)) == asyncio.run(main(cancel=False))


def test_a_wave_waits_until_the_thinking_episode_leaves(decoder: Decoder, request_for: Ask) -> None:
    async def main() -> None:
        barrier = Barrier()
        worker = EngineWorker(
            decoder.config, decoder.state_dict(), limits=LIMITS, num_threads=1, barrier=barrier
        )
        with barrier.episode():
            barrier.enter()
            asked = asyncio.ensure_future(worker.generate(request_for("a", [1], max_tokens=1)))
            # A score passes through the same thread, so the wave had its chance before it.
            await worker.score((1, 2))
            assert not asked.done()
            barrier.leave()
            async with asyncio.timeout(DEADLINE_S):
                await asked
        await worker.close()

    asyncio.run(main())


def test_a_request_from_no_live_episode_is_refused(decoder: Decoder, request_for: Ask) -> None:
    async def main() -> None:
        worker = EngineWorker(
            decoder.config, decoder.state_dict(), limits=LIMITS, num_threads=1, barrier=Barrier()
        )
        with pytest.raises(UserError, match="no live episode"):
            await worker.generate(request_for("a", [1]))
        await worker.close()

    asyncio.run(main())


def test_closing_interrupts_a_wave(
    decoder: Decoder, request_for: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = EngineCore.step
    steps: list[Any] = []

    async def main() -> Generation:
        barrier = Barrier()
        worker = EngineWorker(
            decoder.config, decoder.state_dict(), limits=LIMITS, num_threads=1, barrier=barrier
        )

        def step(core: EngineCore) -> Any:
            steps.append(None)
            if len(steps) == 3:
                worker._loop.close()
            return real(core)

        monkeypatch.setattr(EngineCore, "step", step)
        with barrier.episode():
            async with asyncio.timeout(DEADLINE_S):
                result = await worker.generate(request_for("a", [1], max_tokens=200))
        await worker.close()
        return result

    assert len(asyncio.run(main()).token_ids) == 3


def test_in_a_wave_a_broken_request_fails_and_the_others_are_answered(
    decoder: Decoder, request_for: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = batch.forward

    def broken(model: Any, cache: Any, work: Any, kv: Any) -> torch.Tensor:
        bad = [w.sequence.request.request_id == "b" for w in work for _ in range(w.num_tokens)]
        return real(model, cache, work, kv).masked_fill(torch.tensor(bad)[:, None], torch.nan)

    monkeypatch.setattr(batch, "forward", broken)

    async def main() -> list[Any]:
        barrier = Barrier()
        worker = EngineWorker(
            decoder.config, decoder.state_dict(), limits=LIMITS, num_threads=1, barrier=barrier
        )

        async def deltas(name: str) -> list[Any]:
            request = request_for(name, [1, 2], max_tokens=4)
            return [delta async for delta in worker.stream(request)]

        for _ in range(3):
            barrier.enter()
        async with asyncio.timeout(DEADLINE_S):
            results = await asyncio.gather(
                deltas("a"),
                deltas("b"),
                worker.generate(request_for("c", [1, 2], max_tokens=4)),
                return_exceptions=True,
            )
        await worker.close()
        return results

    streamed, failed, whole = asyncio.run(main())
    assert isinstance(failed, ClassifiedFailure)
    # In a wave nothing is told before the end, and nothing is timed.
    assert [len(delta.token_ids) for delta in streamed] == [4]
    assert len(whole.token_ids) == 4
    assert whole.queued_s == whole.first_token_s == 0.0


def test_leaving_without_entering_is_our_bug() -> None:
    with pytest.raises(AssertionError):
        Barrier().leave()
