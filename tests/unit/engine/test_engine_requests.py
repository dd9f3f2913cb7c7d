"""What a request may ask for: stops, truncation, alternatives, prompt log-probs; and what it may
not: each refusal and each failure concerns that request alone."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from burnish.core.errors import UserError
from burnish.core.records import Failure, GenerateRequest, Generation, Grammar, SamplingParams
from burnish.core.vocabulary import FailureKind, GrammarKind, StopReason
from burnish.model.decoder import Decoder
from burnish.rollout.engine.engine import EngineCore
from burnish.rollout.engine.limits import CoreLimits
from burnish.rollout.engine.weights import ServedModel

Ask = Callable[..., GenerateRequest]
TOLERANCE = 1e-4
LIMITS = CoreLimits(num_pages=120, page_size=4, budget_tokens=16)


def letters(ids: Any) -> str:
    """Every token is one letter."""
    return "".join(chr(ord("a") + i % 26) for i in ids)


def core(decoder: Decoder, limits: CoreLimits = LIMITS) -> EngineCore:
    return EngineCore(
        decoder.config, decoder.state_dict(), dtype=torch.float32, limits=limits, decode=letters
    )


def run(engine: EngineCore, *requests: GenerateRequest) -> dict[str, Generation | Failure]:
    for request in requests:
        engine.add(request)
    done: dict[str, Generation | Failure] = {}
    while engine.has_work:
        done |= {sequence.request.request_id: outcome for sequence, outcome in engine.step()}
        engine.check()
    return done


def with_prompt(request_id: str, prompt: Any, **params: Any) -> GenerateRequest:
    return GenerateRequest(
        request_id=request_id,
        prompt_ids=tuple(prompt),
        params=SamplingParams(**params),
        prompt_logprobs=True,
    )


def test_a_stop_string_ends_the_text_and_its_tokens_are_kept(
    decoder: Decoder, request_for: Ask
) -> None:
    engine = core(decoder)
    free = run(engine, request_for("a", [1, 2, 3], max_tokens=20, seed=5))["a"]
    text = letters(free.token_ids)
    stop = text[4:7]
    first = text.index(stop) + len(stop)
    got = run(engine, request_for("a", [1, 2, 3], max_tokens=20, seed=5, stop=("@", stop)))["a"]
    assert got.token_ids == free.token_ids[:first]
    assert got.stop_reason is StopReason.STOP


def test_nothing_stops_before_the_least_number_of_tokens(
    decoder: Decoder, request_for: Ask
) -> None:
    engine = core(decoder)
    params = {"max_tokens": 12, "seed": 5, "temperature": 0.0}
    free = run(engine, request_for("a", [1, 2, 3], **params))["a"]
    stop_id = free.token_ids[2]
    got = run(
        engine,
        request_for(
            "a", [1, 2, 3], stop_token_ids=(stop_id, 10**6), stop=("a", "b"), min_tokens=9, **params
        ),
    )["a"]
    assert len(got.token_ids) >= 9
    # It could not be drawn, and the log-probs are those of what could be.
    assert stop_id not in got.token_ids[:9]
    same = free.token_ids.index(stop_id)
    assert got.token_ids[:same] == free.token_ids[:same]
    forbidden = run(engine, request_for("a", [1, 2, 3], stop_token_ids=(), **params))["a"]
    assert forbidden.token_ids == free.token_ids


def test_logprobs_under_min_tokens_are_of_the_distribution_without_the_stops(
    decoder: Decoder, request_for: Ask, dense_logprobs: Any
) -> None:
    stops = tuple(range(0, 300, 2))
    got = run(
        core(decoder),
        request_for("a", [1, 2, 3], max_tokens=4, min_tokens=4, stop_token_ids=stops, seed=2),
    )["a"]
    logits = dense_logprobs(decoder, [1, 2, 3, *got.token_ids])
    logits[:, list(stops)] = -torch.inf
    expected = logits.log_softmax(-1)
    for i, token in enumerate(got.token_ids):
        assert token % 2 == 1
        assert got.logprobs[i] == pytest.approx(float(expected[2 + i, token]), abs=TOLERANCE)


def test_top_logprobs_come_with_every_token(
    decoder: Decoder, request_for: Ask, dense_logprobs: Any
) -> None:
    got = run(
        core(decoder),
        request_for("a", [1, 2, 3], max_tokens=5, num_top_logprobs=3, temperature=0.7),
        request_for("b", [1, 2, 3], max_tokens=5),
    )
    assert got["b"].top_logprobs == ()
    reference = (dense_logprobs(decoder, [1, 2, 3, *got["a"].token_ids]) / 0.7).log_softmax(-1)
    assert len(got["a"].top_logprobs) == 5
    for i, top in enumerate(got["a"].top_logprobs):
        values, ids = reference[2 + i].topk(3)
        assert [token for token, _ in top] == ids.tolist()
        assert [value for _, value in top] == pytest.approx(values.tolist(), abs=TOLERANCE)


@pytest.mark.parametrize("max_tokens", [0, 3])
def test_prompt_logprobs_are_computed_even_where_the_prefix_is_known(
    decoder: Decoder, request_for: Ask, dense_logprobs: Any, max_tokens: int
) -> None:
    engine, prompt = core(decoder), [*range(5, 42)]
    run(engine, request_for("warm", prompt, max_tokens=2))
    got = run(engine, with_prompt("a", prompt, max_tokens=max_tokens))["a"]
    reference = dense_logprobs(decoder, prompt)
    expected = [0.0] + [float(reference[i, t]) for i, t in enumerate(prompt[1:])]
    assert got.prompt_logprobs == pytest.approx(expected, abs=TOLERANCE)
    assert len(got.token_ids) == max_tokens
    assert got.cached_tokens == 0
    # Others may still share what it computed.
    assert run(engine, request_for("b", prompt, max_tokens=1))["b"].cached_tokens == 36


def test_a_prompt_that_fills_the_context_can_be_scored_but_not_continued(
    decoder: Decoder, request_for: Ask, dense_logprobs: Any
) -> None:
    prompt = [i % 300 for i in range(256)]
    got = run(core(decoder), with_prompt("a", prompt, max_tokens=0))["a"]
    assert len(got.prompt_logprobs) == 256
    assert got.prompt_logprobs[-1] == pytest.approx(
        float(dense_logprobs(decoder, prompt)[-2, prompt[-1]]), abs=TOLERANCE
    )
    with pytest.raises(UserError, match="context"):
        core(decoder).add(with_prompt("a", prompt, max_tokens=1))
    with pytest.raises(UserError, match="max_tokens"):
        core(decoder).add(request_for("a", prompt[:5], max_tokens=0))


def test_prompt_logprobs_after_an_update_are_of_one_version(
    make_decoder: Any, dense_logprobs: Any
) -> None:
    old, new = make_decoder(seed=0), make_decoder(seed=1)
    engine, prompt = core(old), [*range(60)]
    engine.add(with_prompt("a", prompt, max_tokens=0))
    engine.step()
    engine.update_weights(new.state_dict(), 1)
    got = run(engine)["a"]
    reference = dense_logprobs(new, prompt)
    expected = [0.0] + [float(reference[i, t]) for i, t in enumerate(prompt[1:])]
    assert got.prompt_logprobs == pytest.approx(expected, abs=TOLERANCE)


@pytest.mark.parametrize("temperature", [1e-30, 1e6])
def test_extreme_temperatures_give_finite_logprobs(
    decoder: Decoder, request_for: Ask, temperature: float
) -> None:
    got = run(core(decoder), request_for("a", [1, 2], temperature=temperature, max_tokens=6))["a"]
    assert all(map(math.isfinite, got.logprobs))
    if temperature > 1:
        assert got.logprobs == pytest.approx([-math.log(300)] * 6, abs=1e-3)


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """A token whose hidden state is not a number, as a broken kernel would make it."""
    real = ServedModel.hidden

    def hidden(model: ServedModel, ids_T: Any, positions_T: Any, attend: Any, **more: Any) -> Any:
        def spread(layer: int, q: Any, k: Any, v: Any) -> Any:
            v = v.masked_fill((ids_T == 299)[:, None, None], torch.nan)
            return attend(layer, q, k, v)

        return real(model, ids_T, positions_T, spread, **more)

    monkeypatch.setattr(ServedModel, "hidden", hidden)


@pytest.mark.parametrize("asks_prompt", [False, True])
def test_a_request_whose_logits_are_not_finite_fails_alone(
    decoder: Decoder, request_for: Ask, poisoned: None, asks_prompt: bool
) -> None:
    healthy = [request_for(f"h{i}", [7, 8, 9, 10, 11, i], max_tokens=8, seed=i) for i in range(3)]
    expected = run(core(decoder), *healthy)
    bad = [7, 8, 9, 10, 11, 299, 12, 13, 14]
    broken = with_prompt("x", bad) if asks_prompt else request_for("x", bad)
    # Few pages: what the broken request wrote is soon used again, and must not spread.
    engine = core(decoder, LIMITS._replace(num_pages=22))
    for round_ in range(3):
        got = run(engine, healthy[0], broken, *healthy[1:])
        failure = got.pop("x")
        assert isinstance(failure, Failure)
        assert failure.kind is FailureKind.INFRA
        assert "not finite" in failure.message
        assert {k: g.token_ids for k, g in got.items()} == {
            k: g.token_ids for k, g in expected.items()
        }
        assert engine.counters.num_failed == round_ + 1
    assert engine.free_pages == 22


def test_a_decoder_that_raises_fails_only_the_request_that_needs_it(
    decoder: Decoder, request_for: Ask
) -> None:
    def broken(ids: Any) -> str:
        raise RuntimeError("no such token")

    engine = EngineCore(
        decoder.config, decoder.state_dict(), dtype=torch.float32, limits=LIMITS, decode=broken
    )
    got = run(engine, request_for("a", [1], stop=("x",)), request_for("b", [1], max_tokens=3))
    assert isinstance(got["a"], Failure)
    assert len(got["b"].token_ids) == 3


@pytest.mark.parametrize(
    ("params", "word"),
    [
        ({"top_k": -1}, "top_k"),
        ({"min_p": 1.0}, "min_p"),
        ({"min_p": float("nan")}, "min_p"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"num_top_logprobs": 65}, "num_top_logprobs"),
        ({"temperature": float("inf")}, "temperature"),
        ({"stop": ("a", "")}, "stop string"),
        ({"grammar": Grammar(kind=GrammarKind.REGEX, text="a")}, "grammar"),
    ],
)
def test_impossible_parameters_are_refused_by_name(
    decoder: Decoder, request_for: Ask, params: dict[str, Any], word: str
) -> None:
    with pytest.raises(UserError, match=word):
        core(decoder).add(request_for("a", [1], **params))


def test_what_the_engine_was_not_given_is_refused(decoder: Decoder, request_for: Ask) -> None:
    engine = EngineCore(decoder.config, decoder.state_dict(), limits=LIMITS)
    with pytest.raises(UserError, match="tokenizer"):
        engine.add(request_for("a", [1], stop=("x",)))
    hasty = GenerateRequest(request_id="a", prompt_ids=(1,), params=SamplingParams(), priority=101)
    with pytest.raises(UserError, match="priority"):
        engine.add(hasty)
    adapted = GenerateRequest(
        request_id="a", prompt_ids=(1,), params=SamplingParams(), adapter="mine"
    )
    with pytest.raises(UserError, match="mine"):
        engine.add(adapted)


def test_a_group_on_a_long_prompt_holds_one_copy_of_it(decoder: Decoder, request_for: Ask) -> None:
    prompt, limits = (
        [i % 290 for i in range(201)],
        LIMITS._replace(num_pages=2000, budget_tokens=4096),
    )

    def used(requests: list[GenerateRequest]) -> int:
        engine = core(decoder, limits)
        for request in requests:
            engine.add(request)
        most = 0
        while engine.has_work:
            engine.step()
            most = max(most, 2000 - engine.free_pages)
        return most

    group = used([request_for(str(k), prompt, max_tokens=4, seed=k) for k in range(16)])
    apart = used([request_for(str(k), [k, *prompt], max_tokens=4, seed=k) for k in range(16)])
    assert group <= apart / 8


def test_a_pinned_prefix_survives_pressure_and_updates(make_decoder: Any, request_for: Ask) -> None:
    engine = core(make_decoder(), LIMITS._replace(num_pages=40))
    system = tuple(range(100, 117))
    number = engine.pin(system)

    def cached(name: str) -> int:
        got = run(engine, request_for(name, [*system, 1, 2], max_tokens=2))[name]
        assert isinstance(got, Generation)
        return got.cached_tokens

    assert cached("first") == 0
    pressure = [request_for(f"p{i}", range(i, i + 60), max_tokens=1) for i in range(3)]
    run(engine, *pressure)
    assert cached("second") >= 16
    engine.update_weights(make_decoder(seed=1).state_dict(), 1)
    assert cached("after update") == 0
    run(engine, *pressure)
    assert cached("again") >= 16
    engine.unpin(number)
    run(engine, *pressure)
    assert cached("unpinned") == 0


def test_a_pin_gives_way_to_a_request_that_needs_every_page(
    decoder: Decoder, request_for: Ask
) -> None:
    engine = core(decoder, LIMITS._replace(num_pages=12))
    engine.pin(tuple(range(20)))
    run(engine, request_for("a", range(20), max_tokens=2))
    assert engine.free_pages == 7
    got = run(engine, request_for("b", range(200, 240), max_tokens=8))["b"]
    assert len(got.token_ids) == 8
