"""What every engine owes its callers; each backend is a row of BACKENDS."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import torch

from burnish.core.protocols import Engine
from burnish.core.records import GenerateRequest, SamplingParams
from burnish.core.vocabulary import StopReason
from burnish.model.config import ModelConfig
from burnish.model.decoder import Decoder
from burnish.rollout.engine.barrier import Barrier
from burnish.rollout.engine.limits import CoreLimits
from burnish.rollout.engine.worker import EngineWorker

DEADLINE_S = 60.0
CONFIG = ModelConfig(
    family="llama",
    vocab_size=120,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_position_embeddings=128,
    rms_norm_eps=1e-5,
    rope_theta=1e4,
    tie_word_embeddings=True,
)


class Backend:
    """An engine, and how an episode announces itself to it."""

    def __init__(self, state: Any, *, with_barrier: bool) -> None:
        self.barrier = Barrier() if with_barrier else None
        self.engine: Engine = EngineWorker(
            CONFIG,
            state,
            version=4,
            limits=CoreLimits(num_pages=64, page_size=8),
            num_threads=1,
            barrier=self.barrier,
        )

    async def ask(self, *requests: GenerateRequest) -> list[Any]:
        for _ in range(len(requests) if self.barrier else 0):
            self.barrier.enter()
        tasks = [asyncio.ensure_future(self.engine.generate(r)) for r in requests]
        if self.barrier:
            for task in tasks:
                # Also right for a task that is cancelled before it has begun.
                task.add_done_callback(lambda _: self.barrier.leave())
        return await asyncio.gather(*tasks)


BACKENDS = {"worker": {"with_barrier": False}, "worker_with_barrier": {"with_barrier": True}}


def state(seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    decoder = Decoder(CONFIG)
    for parameter in decoder.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, 0, 0.2, generator=generator)
    return decoder.state_dict()


def request(name: str, **params: Any) -> GenerateRequest:
    values = {"max_tokens": 6, "seed": 3} | params
    return GenerateRequest(
        request_id=name, prompt_ids=(1, 2, 3, 4), params=SamplingParams(**values)
    )


@pytest.fixture(params=BACKENDS)
def play(request: pytest.FixtureRequest) -> Callable[[Callable[[Backend], Awaitable[None]]], None]:
    def runner(scenario: Callable[[Backend], Awaitable[None]]) -> None:
        async def main() -> None:
            backend = Backend(state(0), **BACKENDS[request.param])
            try:
                async with asyncio.timeout(DEADLINE_S):
                    await scenario(backend)
            finally:
                await backend.engine.close()

        asyncio.run(main())

    return runner


def test_every_token_has_a_logprob_and_a_version(play: Any) -> None:
    async def scenario(backend: Backend) -> None:
        (got,) = await backend.ask(request("a"))
        assert got.request_id == "a"
        assert len(got.token_ids) == len(got.logprobs) == len(got.weight_versions) == 6
        assert all(value <= 0.0 for value in got.logprobs)
        assert set(got.weight_versions) == {backend.engine.weight_version} == {4}
        assert got.stop_reason is StopReason.LENGTH

    play(scenario)


def test_the_same_seed_gives_the_same_tokens_and_another_seed_others(play: Any) -> None:
    async def scenario(backend: Backend) -> None:
        one, two = await backend.ask(request("a", seed=1), request("b", seed=2))
        (again,) = await backend.ask(request("c", seed=1))
        assert one.token_ids == again.token_ids
        assert one.token_ids != two.token_ids

    play(scenario)


def test_a_stop_token_is_kept_and_named_as_the_reason(play: Any) -> None:
    async def scenario(backend: Backend) -> None:
        (free,) = await backend.ask(request("a", temperature=0.0))
        stop = free.token_ids[2]
        (got,) = await backend.ask(request("b", temperature=0.0, stop_token_ids=(stop,)))
        assert got.token_ids == free.token_ids[: free.token_ids.index(stop) + 1]
        assert got.stop_reason is StopReason.STOP

    play(scenario)


def test_sampled_logprobs_agree_with_the_score(play: Any) -> None:
    async def scenario(backend: Backend) -> None:
        (got,) = await backend.ask(request("a"))
        scores = await backend.engine.score((1, 2, 3, 4, *got.token_ids))
        assert scores[0] == 0.0
        assert got.logprobs == pytest.approx(scores[4:], abs=0.05)

    play(scenario)


def test_new_weights_answer_once_the_update_has_returned(play: Any) -> None:
    async def scenario(backend: Backend) -> None:
        probe = (5, 6, 7, 8)
        old = await backend.engine.score(probe)
        await backend.engine.update_weights(state(1), 9)
        assert backend.engine.weight_version == 9
        assert await backend.engine.score(probe) != old
        (got,) = await backend.ask(request("a"))
        assert set(got.weight_versions) == {9}

    play(scenario)


def test_a_cancelled_caller_leaves_the_engine_usable(play: Any) -> None:
    async def scenario(backend: Backend) -> None:
        task = asyncio.ensure_future(backend.ask(request("a", max_tokens=100)))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        (got,) = await backend.ask(request("b"))
        assert len(got.token_ids) == 6

    play(scenario)


def test_closing_twice_is_harmless(play: Any) -> None:
    async def scenario(backend: Backend) -> None:
        await backend.engine.close()
        await backend.engine.close()

    play(scenario)
