"""The core against a dense fp32 forward: whatever path a token took, its log-prob is exact."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from burnish.core.errors import UserError
from burnish.core.records import GenerateRequest, Generation
from burnish.core.vocabulary import StopReason
from burnish.model.decoder import Decoder
from burnish.rollout.engine.engine import EngineCore
from burnish.rollout.engine.limits import CoreLimits

Ask = Callable[..., GenerateRequest]
# Float32 sums of some hundred terms near 10: eps * 10 * sqrt(300) is 2e-5, with margin.
TOLERANCE = 1e-4


def core(decoder: Decoder, **limits: int) -> EngineCore:
    sizes = {"num_pages": 200, "page_size": 4, "budget_tokens": 24} | limits
    return EngineCore(
        decoder.config, decoder.state_dict(), dtype=torch.float32, limits=CoreLimits(**sizes)
    )


def drain(engine: EngineCore, most_steps: int = 2000) -> dict[str, Generation]:
    done: dict[str, Generation] = {}
    for _ in range(most_steps):
        if not engine.has_work:
            return done
        for _, generation in engine.step():
            done[generation.request_id] = generation
        engine.check()
    raise AssertionError("the engine does not come to an end")


def run(engine: EngineCore, requests: list[GenerateRequest]) -> dict[str, Generation]:
    for request in requests:
        engine.add(request)
    return drain(engine)


def assert_exact(
    decoder: Decoder, dense: Any, requests: list[GenerateRequest], done: dict[str, Generation]
) -> None:
    for request in requests:
        got = done[request.request_id]
        assert len(got.logprobs) == len(got.token_ids) == len(got.weight_versions) > 0
        ids = [*request.prompt_ids, *got.token_ids]
        scaled = dense(decoder, ids) / (request.params.temperature or 1.0)
        logprobs = scaled.log_softmax(-1)
        first = len(request.prompt_ids) - 1
        for i, token in enumerate(got.token_ids):
            assert got.logprobs[i] == pytest.approx(
                float(logprobs[first + i, token]), abs=TOLERANCE
            )
            if request.params.temperature == 0:
                assert float(logprobs[first + i].max() - logprobs[first + i, token]) < TOLERANCE


def group_requests(request_for: Ask, groups: int = 5, size: int = 4) -> list[GenerateRequest]:
    rng = random.Random(7)
    requests = []
    for g in range(groups):
        prompt = [rng.randrange(300) for _ in range(rng.randrange(1, 40))]
        for k in range(size):
            requests.append(
                request_for(
                    f"{g}/{k}",
                    prompt,
                    max_tokens=rng.randrange(1, 30),
                    seed=10 * g + k,
                    temperature=(0.0, 1.0, 0.7, 1.4)[k % 4],
                )
            )
    return requests


FAMILIES = {
    "llama": {},
    "untied": {"tie_word_embeddings": False},
    "qwen2": {"family": "qwen2", "qkv_bias": True},
    "qwen3": {"family": "qwen3", "qk_norm": True},
    "mistral": {"family": "mistral", "sliding_window": 9},
    "no_groups": {"num_heads": 2},
    "biased": {"o_bias": True, "mlp_bias": True, "qkv_bias": True},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_equal_a_dense_forward(
    family: str, make_decoder: Any, dense_logprobs: Any, request_for: Ask
) -> None:
    decoder = make_decoder(**FAMILIES[family])
    engine = core(decoder)
    requests = group_requests(request_for)
    done = run(engine, requests)
    assert_exact(decoder, dense_logprobs, requests, done)
    assert engine.free_pages == 200


def test_preemption_loses_no_token_and_no_logprob(
    decoder: Decoder, dense_logprobs: Any, request_for: Ask
) -> None:
    requests = group_requests(request_for)
    plenty = run(core(decoder), requests)
    tight = core(decoder, num_pages=18)
    done = run(tight, requests)
    assert tight.counters.num_preemptions > 0
    assert tight.free_pages == 18
    assert_exact(decoder, dense_logprobs, requests, done)
    assert {k: g.token_ids for k, g in done.items()} == {k: g.token_ids for k, g in plenty.items()}


def test_rows_of_very_different_length_share_a_step(
    decoder: Decoder, dense_logprobs: Any, request_for: Ask
) -> None:
    requests = [request_for("long", [i % 300 for i in range(230)], max_tokens=10)]
    requests += [request_for(f"s{i}", [i, i + 1], max_tokens=12, seed=i) for i in range(9)]
    engine = core(decoder, budget_tokens=512, page_size=2)
    assert_exact(decoder, dense_logprobs, requests, run(engine, requests))


def test_a_group_computes_its_prompt_once(decoder: Decoder, request_for: Ask) -> None:
    prompt = list(range(30, 61))
    requests = [request_for(str(k), prompt, max_tokens=8, seed=k) for k in range(8)]
    engine = core(decoder, budget_tokens=512)
    done = run(engine, requests)
    # Each sibling computes the last prompt token alone: its hidden state gives the first sample.
    assert engine.counters.prompt_tokens == 31 + 7
    assert [done[str(k)].cached_tokens for k in range(8)] == [0] + [30] * 7
    assert len({done[str(k)].token_ids for k in range(8)}) > 1


def test_the_next_turn_reuses_the_whole_last_one(
    decoder: Decoder, dense_logprobs: Any, request_for: Ask
) -> None:
    engine = core(decoder)
    first = run(engine, [request_for("a", range(10, 20), max_tokens=9)])["a"]
    prompt = [*range(10, 20), *first.token_ids, 7, 8]
    request = request_for("b", prompt, max_tokens=5)
    done = run(engine, [request])
    assert done["b"].cached_tokens == 18
    assert_exact(decoder, dense_logprobs, [request], done)


def test_tokens_do_not_depend_on_the_batch(decoder: Decoder, request_for: Ask) -> None:
    requests = group_requests(request_for)
    together = run(core(decoder), requests)
    for request in requests[::3]:
        alone = run(core(decoder), [request])[request.request_id]
        assert alone.token_ids == together[request.request_id].token_ids


def test_a_stop_token_ends_the_request_and_is_kept(decoder: Decoder, request_for: Ask) -> None:
    free = run(core(decoder), [request_for("a", [1, 2, 3], max_tokens=20, seed=5)])["a"]
    stop = free.token_ids[6]
    cut = free.token_ids.index(stop) + 1
    request = request_for("a", [1, 2, 3], max_tokens=20, seed=5, stop_token_ids=(stop, 299))
    got = run(core(decoder), [request])["a"]
    assert got.token_ids == free.token_ids[:cut]
    assert got.stop_reason is StopReason.STOP
    assert free.stop_reason is StopReason.LENGTH
    assert len(free.token_ids) == 20


def test_the_context_bounds_a_generation(decoder: Decoder, request_for: Ask) -> None:
    got = run(core(decoder), [request_for("a", [5] * 250, max_tokens=50)])["a"]
    assert len(got.token_ids) == 6
    assert got.stop_reason is StopReason.LENGTH


@pytest.mark.parametrize(
    ("prompt", "params", "word"),
    [
        ([], {}, "empty"),
        ([1] * 256, {}, "context"),
        ([300], {}, "outside"),
        ([-1], {}, "outside"),
        ([1], {"max_tokens": 0}, "max_tokens"),
        ([1], {"temperature": -0.1}, "temperature"),
        ([1], {"temperature": float("nan")}, "temperature"),
        ([1], {"top_p": 0.0}, "top_p"),
        ([1], {"top_p": 1.1}, "top_p"),
        ([1] * 100, {"max_tokens": 101}, "cache pages"),
    ],
)
def test_impossible_requests_are_refused_with_the_value(
    decoder: Decoder, request_for: Ask, prompt: list[int], params: dict[str, Any], word: str
) -> None:
    engine = core(decoder, num_pages=50)
    with pytest.raises(UserError, match=word):
        engine.add(request_for("a", prompt, **params))
    assert not engine.has_work


def test_a_request_that_needs_every_page_runs_even_over_a_full_prefix_cache(
    decoder: Decoder, dense_logprobs: Any, request_for: Ask
) -> None:
    engine = core(decoder, num_pages=10)
    first = request_for("a", range(30), max_tokens=10)
    second = request_for("b", [*range(30), 1, 2], max_tokens=8, seed=3)
    assert_exact(decoder, dense_logprobs, [first], run(engine, [first]))
    assert_exact(decoder, dense_logprobs, [second], run(engine, [second]))


def test_an_aborted_request_frees_its_pages_and_leaves_others_alone(
    decoder: Decoder, request_for: Ask
) -> None:
    requests = [request_for(str(i), [i, 2, 3], max_tokens=20, seed=i) for i in range(4)]
    alone = run(core(decoder), requests[1:])
    engine = core(decoder)
    handles = [engine.add(request) for request in requests]
    for _ in range(5):
        engine.step()
    aborted = engine.abort(handles[0])
    assert aborted is not None
    assert aborted.stop_reason is StopReason.ABORTED
    assert len(aborted.token_ids) == 5
    done = drain(engine)
    assert {k: g.token_ids for k, g in done.items()} == {k: g.token_ids for k, g in alone.items()}
    assert engine.abort(handles[0]) is None
    assert engine.free_pages == 200


def test_each_token_carries_the_version_that_made_it(
    make_decoder: Any, request_for: Ask, dense_logprobs: Any
) -> None:
    old, new = make_decoder(seed=0), make_decoder(seed=1)
    engine = core(old)
    engine.add(request_for("a", range(9), max_tokens=10))
    for _ in range(4):
        engine.step()
    engine.update_weights(new.state_dict(), 3)
    late = request_for("b", range(9), max_tokens=4)
    done = run(engine, [late])
    assert done["a"].weight_versions == (0,) * 4 + (3,) * 6
    # Nothing that the old weights computed is reused by a new request.
    assert done["b"].cached_tokens == 0
    assert_exact(new, dense_logprobs, [late], done)
    again = request_for("c", range(9), max_tokens=4)
    assert run(engine, [again])["c"].cached_tokens == 8


def test_mixed_version_cache_is_never_shared(
    make_decoder: Any, request_for: Ask, dense_logprobs: Any
) -> None:
    engine = core(make_decoder(seed=0))
    new = make_decoder(seed=1)
    engine.add(request_for("a", range(9), max_tokens=12))
    for _ in range(4):
        engine.step()
    engine.update_weights(new.state_dict(), 1)
    mixed = drain(engine)["a"]
    prompt = [*range(9), *mixed.token_ids]
    request = request_for("b", prompt, max_tokens=3)
    done = run(engine, [request])
    assert done["b"].cached_tokens == 0
    assert_exact(new, dense_logprobs, [request], done)


def test_bf16_stays_near_the_dense_forward(
    decoder: Decoder, dense_logprobs: Any, request_for: Ask
) -> None:
    engine = EngineCore(
        decoder.config, decoder.state_dict(), limits=CoreLimits(num_pages=200, page_size=4)
    )
    requests = [request_for(str(i), range(i, i + 12), max_tokens=12, seed=i) for i in range(6)]
    done = run(engine, requests)
    gaps = []
    for request in requests:
        got = done[request.request_id]
        reference = dense_logprobs(decoder, [*request.prompt_ids, *got.token_ids])
        gaps += [
            abs(float(reference[11 + i, t]) - lp)
            for i, (t, lp) in enumerate(zip(got.token_ids, got.logprobs, strict=True))
        ]
    # bf16 keeps 8 bits: relative error 2**-9 on logits with a spread of about 13.
    assert sum(gaps) / len(gaps) < 0.1
