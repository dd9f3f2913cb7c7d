"""Whatever one caller does wrong, it hears so, and a neighbour in its batch notices nothing."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest
import torch

from burnish.core.errors import UserError
from burnish.core.records import GenerateRequest, Generation
from burnish.core.vocabulary import SleepLevel
from burnish.model.decoder import Decoder
from burnish.rollout.engine.limits import CoreLimits
from burnish.rollout.engine.worker import EngineWorker

Ask = Callable[..., GenerateRequest]
Act = Callable[[EngineWorker], Awaitable[Any]]
DEADLINE_S = 30.0
PROMPT = [(7 * i * i + 3 * i) % 300 for i in range(21)]


def decode(ids: Any) -> str:
    return bytes(i for i in ids if i < 256).decode("latin-1")


def worker_for(decoder: Decoder) -> EngineWorker:
    return EngineWorker(
        decoder.config,
        decoder.state_dict(),
        dtype=torch.float32,
        limits=CoreLimits(num_pages=100, page_size=4),
        decode=decode,
        num_threads=1,
    )


def assert_refused_alone(decoder: Decoder, ask: Ask, act: Act, message: str) -> None:
    """`act` raises a UserError with `message`; what runs beside it and comes after it is right."""

    async def scenario() -> None:
        worker = worker_for(decoder)
        beside = ask("beside", PROMPT, max_tokens=24, temperature=0.9, seed=3)
        alone = await worker.generate(beside)
        task = asyncio.create_task(worker.generate(beside))
        await asyncio.sleep(0)
        with pytest.raises(UserError, match=message):
            await act(worker)
        assert (await task).token_ids == alone.token_ids
        again = await worker.generate(msgspec.structs.replace(beside, request_id="again"))
        assert again.token_ids == alone.token_ids
        stats = worker.stats()
        assert stats.free_pages == stats.num_pages
        assert stats.num_outstanding == 0
        await worker.close()

    asyncio.run(asyncio.wait_for(scenario(), DEADLINE_S))


REQUESTS: list[tuple[dict[str, Any], str]] = [
    ({"prompt_ids": (1.0, 2.5)}, "prompt_ids is 1.0"),
    ({"prompt_ids": (1, None)}, "prompt_ids is None"),
    ({"prompt_ids": "abc"}, "prompt_ids is 'abc'"),
    ({"prompt_ids": (1, -1)}, "outside"),
    ({"request_id": 5}, "request_id is 5"),
    ({"session_id": [1]}, "session_id"),
    ({"priority": float("nan")}, "priority is nan"),
    ({"prompt_logprobs": "no"}, "prompt_logprobs"),
    ({"params": None}, "params is None"),
]
PARAMS: list[tuple[dict[str, Any], str]] = [
    ({"temperature": None}, "temperature is None"),
    ({"temperature": "1"}, "temperature is '1'"),
    ({"max_tokens": 2.5}, "max_tokens is 2.5"),
    ({"top_k": 2.5}, "top_k is 2.5"),
    ({"num_top_logprobs": 2.5}, "num_top_logprobs is 2.5"),
    ({"seed": "x"}, "seed is 'x'"),
    ({"stop": "abc"}, "stop is 'abc'"),
    ({"stop": (5,)}, "stop is 5"),
    ({"stop_token_ids": 5}, "stop_token_ids is 5"),
    ({"stop_token_ids": (None,)}, "stop_token_ids is None"),
    ({"stop_token_ids": tuple(range(-1, 301)), "min_tokens": 2}, "every token is a stop token"),
    ({"grammar": "[ab]+"}, "grammar is"),
]


@pytest.mark.parametrize(("values", "message"), REQUESTS)
def test_a_request_of_wrong_types_is_refused_alone(
    values: dict[str, Any], message: str, decoder: Decoder, request_for: Ask
) -> None:
    request = msgspec.structs.replace(request_for("bad", PROMPT, max_tokens=8), **values)
    assert_refused_alone(decoder, request_for, lambda w: w.generate(request), message)


@pytest.mark.parametrize(("values", "message"), PARAMS)
def test_parameters_of_wrong_types_are_refused_alone(
    values: dict[str, Any], message: str, decoder: Decoder, request_for: Ask
) -> None:
    request = request_for("bad", PROMPT, **({"max_tokens": 8} | values))
    assert_refused_alone(decoder, request_for, lambda w: w.generate(request), message)


def keys(num_tokens: int = 8, width: int = 16, value: float = 0.0) -> Any:
    tensor = torch.full((num_tokens, 2, width), value)
    return [(tensor, tensor)] * 3


CALLS: dict[str, tuple[Act, str]] = {
    "score floats": (lambda w: w.score((1.5, 2.5)), "tokens to score"),  # type: ignore[arg-type]
    "pin unknown": (lambda w: w.pin((1, -5)), "outside"),
    "pin floats": (lambda w: w.pin((1.5,)), "pinned prefix"),  # type: ignore[arg-type]
    "adopt nothing": (lambda w: w.adopt(range(8), []), "0 layers"),
    "adopt too few": (lambda w: w.adopt(range(8), keys(4)), "of shape"),
    "adopt too narrow": (lambda w: w.adopt(range(8), keys(8, 8)), "of shape"),
    "adopt no numbers": (lambda w: w.adopt(range(8), keys(value=float("nan"))), "finite"),
    "adopt unknown": (lambda w: w.adopt([-1] * 8, keys()), "outside"),
    "weights of no type": (lambda w: w.update_weights(None, 1), "Mapping"),  # type: ignore[arg-type]
    "no draft model": (lambda w: w.update_draft({}), "no draft model"),
    "no such level": (lambda w: w.sleep("deep"), "cache, weights"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_makes_no_sense_is_refused_alone(
    name: str, decoder: Decoder, request_for: Ask
) -> None:
    assert_refused_alone(decoder, request_for, *CALLS[name])


@pytest.mark.parametrize("version", [None, "1"])
def test_a_version_that_is_no_number_is_refused(
    version: Any, decoder: Decoder, request_for: Ask
) -> None:
    state = decoder.state_dict()
    assert_refused_alone(
        decoder, request_for, lambda w: w.update_weights(state, version), "version"
    )


def test_a_policy_may_be_named_by_its_text_and_no_other_word_is_one(
    decoder: Decoder, request_for: Ask, make_gate: Any
) -> None:
    gate = make_gate(2)

    async def scenario() -> Generation:
        worker, state = worker_for(decoder), decoder.state_dict()
        with pytest.raises(UserError, match="keep, recompute, abort"):
            await worker.update_weights(state, 1, "drop")  # type: ignore[arg-type]
        task = asyncio.create_task(worker.generate(request_for("a", PROMPT, max_tokens=20)))
        await gate.wait()
        update = asyncio.create_task(worker.update_weights(state, 1, "abort"))  # type: ignore[arg-type]
        while not worker._loop._calls:  # noqa: ASYNC110 - a state of another thread
            await asyncio.sleep(0)
        gate.go.set()
        await update
        ended = await task
        await worker.close()
        return ended

    assert asyncio.run(asyncio.wait_for(scenario(), DEADLINE_S)).stop_reason == "aborted"


def test_a_sleeping_engine_takes_over_no_keys(decoder: Decoder) -> None:
    async def scenario() -> None:
        worker = worker_for(decoder)
        await worker.sleep(SleepLevel.CACHE)
        with pytest.raises(UserError, match="sleeps"):
            await worker.adopt(range(8), keys())
        await worker.wake()
        assert await worker.adopt(range(8), keys()) == 8
        await worker.close()

    asyncio.run(asyncio.wait_for(scenario(), DEADLINE_S))
