"""Random traffic against a reference that recomputes everything for every token."""

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

from burnish.core.records import GenerateRequest, Generation, SamplingParams
from burnish.core.vocabulary import InFlight, StopReason
from burnish.model.decoder import Decoder
from burnish.rollout.engine.engine import EngineCore
from burnish.rollout.engine.limits import CoreLimits
from burnish.rollout.engine.sampler import Draw, sample, seed_key, uniform

Dense = Callable[[Decoder, list[int]], torch.Tensor]
# Float32 sums of some hundred terms near 10: eps * 10 * sqrt(300) is 2e-5, with margin.
TOLERANCE = 1e-4


class Traffic(NamedTuple):
    """What one run of the fuzz does."""

    seed: int
    limits: CoreLimits
    inflight: InFlight | None = None


CASES = {
    "roomy": Traffic(1, CoreLimits(num_pages=300, page_size=4, budget_tokens=40)),
    "tight, recomputed": Traffic(
        2, CoreLimits(num_pages=16, page_size=4, budget_tokens=16, swap_bytes=0)
    ),
    "tight, swapped": Traffic(3, CoreLimits(num_pages=16, page_size=4, budget_tokens=16)),
    "tight, little host memory": Traffic(
        4, CoreLimits(num_pages=16, page_size=4, budget_tokens=16, swap_bytes=7_000)
    ),
    "few places, tiny chunks": Traffic(
        5, CoreLimits(num_pages=60, page_size=2, budget_tokens=3, max_running=3, ageing_steps=8)
    ),
    "weights, recomputed": Traffic(
        6, CoreLimits(num_pages=40, page_size=4, budget_tokens=16), InFlight.RECOMPUTE
    ),
    "weights, aborted": Traffic(
        7, CoreLimits(num_pages=40, page_size=4, budget_tokens=16), InFlight.ABORT
    ),
}


def make_request(rng: random.Random, number: int, stems: list[list[int]]) -> GenerateRequest:
    stem = rng.choice(stems)
    prompt = stem[: rng.randrange(1, len(stem) + 1)] + [
        rng.randrange(300) for _ in range(rng.randrange(4))
    ]
    # Every eighth request asks only for what its prompt is worth.
    scores_prompt = rng.random() < 0.25
    return GenerateRequest(
        request_id=f"r{number}",
        prompt_ids=tuple(prompt),
        priority=rng.randrange(3),
        session_id=rng.choice([None, f"s{rng.randrange(5)}"]),
        prompt_logprobs=scores_prompt,
        params=SamplingParams(
            max_tokens=0 if scores_prompt and rng.random() < 0.5 else rng.randrange(1, 21),
            temperature=rng.choice([0.0, 0.8, 1.0]),
            top_k=rng.choice([0, 0, 7]),
            top_p=rng.choice([1.0, 1.0, 0.9]),
            seed=rng.randrange(1000),
        ),
    )


def assert_equals_reference(
    versions: list[Decoder], dense: Dense, request: GenerateRequest, got: Generation
) -> None:
    ids, params = [*request.prompt_ids, *got.token_ids], request.params
    # One dense forward per version: attention is causal, so each row is what its prefix gives.
    rows = {v: dense(versions[v], ids) for v in set(got.weight_versions)}
    for i, version in enumerate(got.weight_versions):
        place = len(request.prompt_ids) + i
        number = uniform(seed_key(params.seed), place)
        draw = Draw(params.temperature, params.top_p, number, params.top_k)
        drawn = sample(rows[version][place - 1 : place], [draw])
        assert got.token_ids[i] == drawn.tokens[0]
        assert got.logprobs[i] == pytest.approx(drawn.logprobs[0], abs=TOLERANCE)
    if got.stop_reason is StopReason.LENGTH:
        assert len(got.token_ids) == params.max_tokens


def assert_prompt_scored(
    versions: list[Decoder], dense: Dense, request: GenerateRequest, got: Generation
) -> None:
    prompt = list(request.prompt_ids)
    candidates = []
    for decoder in versions:
        logprobs = dense(decoder, prompt)
        chosen = [float(logprobs[i, token]) for i, token in enumerate(prompt[1:])]
        candidates.append([0.0, *chosen])
    # All from one version of the weights, never a mixture.
    assert any(got.prompt_logprobs == pytest.approx(c, abs=TOLERANCE) for c in candidates)


@pytest.mark.parametrize("name", CASES)
def test_random_traffic_equals_a_reference_that_recomputes_everything(
    name: str, make_decoder: Any, dense_logprobs: Dense
) -> None:
    traffic = CASES[name]
    rng = random.Random(traffic.seed)
    versions = [make_decoder(seed=0)]
    engine = EngineCore(
        versions[0].config, versions[0].state_dict(), dtype=torch.float32, limits=traffic.limits
    )
    stems = [[rng.randrange(300) for _ in range(rng.randrange(8, 34))] for _ in range(4)]
    requests = [make_request(rng, number, stems) for number in range(30)]
    coming = list(reversed(requests))
    handles: dict[str, Any] = {}
    done: dict[str, Generation] = {}
    pins: list[int] = []
    for _ in range(4000):
        if not coming and not engine.has_work:
            break
        for _ in range(rng.choice([0, 1, 5])):
            if coming:
                request = coming.pop()
                handles[request.request_id] = engine.add(request)
        event = rng.random()
        if event < 0.05 and handles:
            victim = handles[rng.choice(sorted(handles))]
            aborted = engine.abort(victim)
            if aborted is not None:
                done[aborted.request_id] = aborted
        elif event < 0.1:
            pins.append(engine.pin(tuple(rng.choice(stems))))
        elif event < 0.15 and pins:
            engine.unpin(pins.pop())
        elif event < 0.2 and traffic.inflight is not None and len(versions) < 4:
            versions.append(make_decoder(seed=len(versions)))
            ended = engine.update_weights(
                versions[-1].state_dict(), len(versions) - 1, traffic.inflight
            )
            done |= {g.request_id: g for _, g in ended}
        done |= {g.request_id: g for _, g in engine.step()}
        engine.check()
    assert len(done) == len(requests), "a request was lost or starved"
    for request in requests:
        got = done[request.request_id]
        assert_equals_reference(versions, dense_logprobs, request, got)
        if request.prompt_logprobs and got.stop_reason is not StopReason.ABORTED:
            assert_prompt_scored(versions, dense_logprobs, request, got)
    for number in pins:
        engine.unpin(number)
    assert engine.free_pages == traffic.limits.num_pages
    assert engine.saved_bytes == 0
    counters = engine.counters
    if "swapped" in name:
        assert counters.num_swaps > 0
    if "recomputed" in name and traffic.inflight is None:
        assert counters.num_preemptions > counters.num_swaps == 0
    if "little" in name:
        assert 0 < counters.num_swaps < counters.num_preemptions
