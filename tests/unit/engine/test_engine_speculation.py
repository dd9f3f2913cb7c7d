"""Guesses change how many forwards there are, never what is sampled."""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from engine_traffic import byte_compiler
from hypothesis import given, settings
from hypothesis import strategies as st

from burnish.core.clock import ManualClock
from burnish.core.errors import UserError
from burnish.core.records import GenerateRequest, Generation, Grammar, SamplingParams
from burnish.core.vocabulary import (
    DraftSampling,
    GrammarKind,
    InFlight,
    KvPolicyKind,
    NoDraft,
    SleepLevel,
    Speculation,
)
from burnish.model.decoder import Decoder
from burnish.model.kernels.library import kernels
from burnish.rollout.engine import batch
from burnish.rollout.engine.engine import EngineCore
from burnish.rollout.engine.limits import CoreLimits, SpeculationLimits
from burnish.rollout.engine.long.policy import KvPolicy
from burnish.rollout.engine.speculation.acceptance import Acceptance
from burnish.rollout.engine.speculation.costs import StepCosts
from burnish.rollout.engine.speculation.lengths import Prices, choose_lengths
from burnish.rollout.engine.speculation.lookup import NgramIndex
from burnish.rollout.engine.speculation.opening import DraftSource
from burnish.rollout.engine.speculation.rejection import acceptance, invert, outcomes, residual

Ask = Callable[..., GenerateRequest]
Build = Callable[..., Decoder]
# fp32 over three layers, as in the tests of the core.
TOLERANCE = 1e-4
LOOP = [3, 5, 7, 11] * 6
KINDS = [Speculation.LOOKUP, Speculation.DRAFT, Speculation.SELF]


def core_for(
    decoder: Decoder,
    kind: Speculation,
    draft: Decoder | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    decode: Any = None,
    sizes: dict[str, Any] | None = None,
    **speculation: Any,
) -> EngineCore:
    chosen = {"num_pages": 200, "page_size": 4} | (sizes or {})
    guesses = SpeculationLimits(kind=kind, **({"max_tokens": 4} | speculation))
    draft = draft or decoder
    core = EngineCore(
        decoder.config,
        decoder.state_dict(),
        dtype=dtype,
        limits=CoreLimits(speculation=guesses, **chosen),
        decode=decode,
        draft=DraftSource(draft.config, draft.state_dict()) if kind is Speculation.DRAFT else None,
    )
    if core._speculator is not None:
        # Guess always: whether it pays is tested apart.
        core._speculator._prices = lambda *_: Prices(1.0, 1e-9)  # type: ignore[method-assign]
    return core


def finish(core: EngineCore) -> dict[str, Any]:
    ended: dict[str, Any] = {}
    while core.has_work:
        ended |= {s.request.request_id: outcome for s, outcome in core.step()}
        core.check()
    return ended


def run(core: EngineCore, requests: Sequence[GenerateRequest]) -> dict[str, Any]:
    for request in requests:
        core.add(request)
    return finish(core)


def mixture(ask: Ask) -> list[GenerateRequest]:
    return [
        ask("greedy", LOOP, max_tokens=24, temperature=0.0),
        ask("free", LOOP[:9], max_tokens=24, seed=1, stop_token_ids=(17, 200)),
        ask("cold", LOOP[:7], max_tokens=24, temperature=0.3, seed=2, top_p=0.8),
        ask("few", LOOP[:11], max_tokens=24, temperature=1.5, seed=3, top_k=9, min_tokens=9),
        ask("least", LOOP[:5], max_tokens=24, temperature=0.7, seed=4, min_p=0.1),
        ask("tops", LOOP[:8], max_tokens=20, temperature=0.2, seed=5, num_top_logprobs=3),
        ask("words", LOOP, max_tokens=24, temperature=0.1, seed=6, stop=("=",)),
    ]


def text(tokens: Sequence[int]) -> str:
    return "".join(chr(48 + token % 40) for token in tokens)


def assert_same(found: dict[str, Generation], wanted: dict[str, Generation]) -> None:
    assert found.keys() == wanted.keys()
    for name, generation in wanted.items():
        assert found[name].token_ids == generation.token_ids, name
        assert found[name].stop_reason == generation.stop_reason
        assert found[name].logprobs == pytest.approx(generation.logprobs, abs=TOLERANCE)
        assert len(found[name].top_logprobs) == len(generation.top_logprobs)
        assert len(found[name].weight_versions) == len(generation.token_ids)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_pages", [200, 20])
def test_tokens_are_those_of_no_speculation(
    kind: Speculation, num_pages: int, decoder: Decoder, make_decoder: Build, request_for: Ask
) -> None:
    sizes = {"num_pages": num_pages, "budget_tokens": 24}
    draft = make_decoder(seed=0, num_layers=3)
    plain = core_for(decoder, Speculation.OFF, decode=text, sizes=sizes)
    guessing = core_for(decoder, kind, draft, decode=text, sizes=sizes)
    assert_same(run(guessing, mixture(request_for)), run(plain, mixture(request_for)))
    assert guessing.counters.drafted_tokens > 0
    assert guessing.free_pages == num_pages
    if num_pages == 20:
        assert guessing.counters.num_preemptions > 0


@pytest.mark.skipif(kernels().library is None, reason=str(kernels().problem))
@pytest.mark.parametrize("kind", KINDS)
def test_in_exact_mode_bits_are_those_of_no_speculation(
    kind: Speculation, decoder: Decoder, request_for: Ask
) -> None:
    sizes = {"page_size": 16, "exact": True}
    requests = mixture(request_for)[:5]
    plain = run(core_for(decoder, Speculation.OFF, dtype=torch.bfloat16, sizes=sizes), requests)
    core = core_for(decoder, kind, dtype=torch.bfloat16, sizes=sizes)
    found = run(core, requests)
    for name, generation in plain.items():
        assert found[name].token_ids == generation.token_ids
        assert found[name].logprobs == generation.logprobs
    # Random weights seldom repeat themselves.
    assert core.counters.drafted_tokens > 0
    assert kind is Speculation.LOOKUP or core.counters.accepted_tokens > 0


def test_a_draft_of_the_same_weights_is_always_right(decoder: Decoder, request_for: Ask) -> None:
    core = core_for(decoder, Speculation.DRAFT)
    run(core, [request_for("a", LOOP[:6], max_tokens=41, seed=9)])
    counters = core.counters
    assert counters.accepted_tokens == counters.drafted_tokens > 0
    assert counters.num_steps < 41 / 3


def test_a_prefix_that_others_computed_is_shared_by_the_draft_model(
    decoder: Decoder, request_for: Ask
) -> None:
    core = core_for(decoder, Speculation.DRAFT)
    requests = [request_for(f"r{i}", LOOP, max_tokens=12, seed=i) for i in range(3)]
    for request in requests:
        run(core, [request])
    assert core.counters.accepted_tokens == core.counters.drafted_tokens


def test_versions_are_right_and_a_stale_draft_model_stands_aside(
    decoder: Decoder, make_decoder: Build, request_for: Ask
) -> None:
    core = core_for(decoder, Speculation.DRAFT, make_decoder(seed=2))
    core.add(request_for("a", LOOP[:6], max_tokens=40, seed=1))
    core.step()
    core.step()
    newer = make_decoder(seed=1).state_dict()
    core.update_weights(newer, 1, InFlight.KEEP)
    before = core.running[0].num_sampled
    core.step()
    drafted = core.counters.drafted_tokens
    core.step()
    assert core.counters.drafted_tokens == drafted
    assert dict(core.counters.undrafted)[NoDraft.STALE] > 0
    core.update_draft(newer)
    generation = finish(core)["a"]
    assert core.counters.drafted_tokens > drafted
    assert generation.weight_versions == (0,) * before + (1,) * (40 - before)


def test_sleeping_gives_the_draft_cache_back_and_tokens_stay_the_same(
    decoder: Decoder, request_for: Ask
) -> None:
    plain = run(core_for(decoder, Speculation.OFF), [request_for("a", LOOP, max_tokens=30)])
    core = core_for(decoder, Speculation.DRAFT)
    core.add(request_for("a", LOOP, max_tokens=30))
    for _ in range(3):
        core.step()
    core.sleep(SleepLevel.CACHE)
    core.wake()
    assert_same(finish(core), plain)


@pytest.mark.parametrize("kind", [Speculation.DRAFT, Speculation.SELF])
@pytest.mark.parametrize("params", [{}, {"temperature": 0.6, "top_k": 6}])
def test_rejection_sampling_keeps_the_distribution(
    kind: Speculation, params: dict[str, Any], make_decoder: Build, request_for: Ask
) -> None:
    sizes = {"vocab_size": 12, "hidden_size": 16, "intermediate_size": 16, "num_layers": 2}
    sizes |= {"num_heads": 2, "num_kv_heads": 1, "head_dim": 8}
    target, draft = make_decoder(seed=0, **sizes), make_decoder(seed=7, **sizes)
    num, counts = 1500, {}
    for how in (Speculation.OFF, kind):
        core = core_for(
            target, how, draft, sampling=DraftSampling.REJECTION, sizes={"num_pages": 4000}
        )
        requests = [
            request_for(f"{how}/{i}", [1, 2], max_tokens=3, seed=i, **params) for i in range(num)
        ]
        found = run(core, requests)
        counts[how] = [Counter(g.token_ids[place] for g in found.values()) for place in range(3)]
        if how is kind:
            assert 0 < core.counters.accepted_tokens < core.counters.drafted_tokens
    for plain, guessed in zip(*counts.values(), strict=True):
        tokens = plain | guessed
        # Two samples of equal size: chi-square with len - 1 degrees of freedom.
        statistic = sum((plain[t] - guessed[t]) ** 2 / (plain[t] + guessed[t]) for t in tokens)
        degrees = len(tokens) - 1
        # Wilson and Hilferty's quantile at 1e-4 (3.72 standard deviations).
        bound = degrees * (1 - 2 / (9 * degrees) + 3.72 * (2 / (9 * degrees)) ** 0.5) ** 3
        assert statistic < bound


def test_log_probs_of_rejection_sampling_are_the_targets(
    decoder: Decoder, make_decoder: Build, request_for: Ask
) -> None:
    core = core_for(
        decoder, Speculation.DRAFT, make_decoder(seed=3), sampling=DraftSampling.REJECTION
    )
    generation = run(core, [request_for("a", LOOP, max_tokens=30, seed=5)])["a"]
    scores = core.score((*LOOP, *generation.token_ids))[len(LOOP) :]
    assert generation.logprobs == pytest.approx(scores, abs=1e-4)


def test_what_cannot_work_is_refused(decoder: Decoder, make_decoder: Build) -> None:
    with pytest.raises(UserError, match="12 tokens"):
        core_for(decoder, Speculation.DRAFT, make_decoder(vocab_size=12))
    with pytest.raises(UserError, match="has 3 layers"):
        core_for(decoder, Speculation.SELF, num_layers=3)
    limits = CoreLimits(speculation=SpeculationLimits(kind=Speculation.DRAFT))
    with pytest.raises(UserError, match="needs one"):
        EngineCore(decoder.config, decoder.state_dict(), dtype=torch.float32, limits=limits)
    window = KvPolicy(kind=KvPolicyKind.WINDOW)
    with pytest.raises(UserError, match="other keys"):
        core_for(decoder, Speculation.LOOKUP, sizes={"kv": window})
    with pytest.raises(UserError, match="no draft model"):
        core_for(decoder, Speculation.OFF).update_draft(decoder.state_dict())


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), size=st.integers(2, 40), sharp=st.floats(0.1, 8.0))
def test_outcomes_of_rejection_sum_to_the_target(seed: int, size: int, sharp: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    p, q = (
        (sharp * torch.randn(size, generator=generator, dtype=torch.float64)).softmax(0)
        for _ in range(2)
    )
    p[0] = 0.0
    p /= p.sum()
    assert float((outcomes(p, q) - p).abs().max()) < 1e-12
    # The same, from what the engine calls for one draft after the other.
    total = torch.zeros(size, dtype=torch.float64)
    for token in range(size):
        keep = acceptance(p, q, token)
        total[token] += q[token] * keep
        total += q[token] * (1 - keep) * residual(p, q)
    assert float((total - p).abs().max()) < 1e-12


@given(st.lists(st.floats(0, 1), min_size=1, max_size=9), st.floats(0, 1, exclude_max=True))
def test_an_inverted_token_has_some_probability(weights: list[float], uniform: float) -> None:
    if sum(weights) > 0:
        p = torch.tensor(weights, dtype=torch.float64)
        assert float(p[invert(p / p.sum(), uniform)]) > 0


@given(st.lists(st.integers(0, 3), max_size=60), st.integers(1, 6))
def test_a_guess_continues_an_earlier_occurrence_of_the_last_two_tokens(
    tokens: list[int], most: int
) -> None:
    index = NgramIndex(sizes=(2,))
    for end in range(len(tokens) + 1):
        index.catch_up(tokens[:end])
    guess = index.guess(tokens, most)
    places = [
        i + 2
        for i in range(len(tokens) - 2)
        if tokens[i : i + 2] == tokens[-2:] and len(tokens) > 2
    ]
    assert bool(guess) == bool(places)
    assert not guess or any(
        all((tokens + list(guess))[p + j] == g for j, g in enumerate(guess)) for p in places
    )


def test_guesses_are_longer_where_they_are_right_and_stop_where_they_cost() -> None:
    prices = Prices(step=1.0, token=0.05)
    assert choose_lengths([0.95, 0.01], [8, 8], prices) == [8, 0]
    assert choose_lengths([0.5], [8], prices)[0] in range(1, 6)
    assert choose_lengths([0.5, 0.5], [8, 8], Prices(1.0, 1.0)) == [0, 0]
    assert choose_lengths([0.6], [8], Prices(1.0, 0.05, level=0.9)) == [0]
    assert choose_lengths([], [], prices) == []


def test_lengths_are_the_best_of_all_for_one_sequence() -> None:
    rng = random.Random(0)
    for _ in range(200):
        rate, prices = rng.random(), Prices(1.0, rng.random() * 0.5)
        values = [
            sum(rate**j for j in range(k + 1)) / (prices.step + k * prices.token) for k in range(9)
        ]
        best = choose_lengths([rate], [8], prices)[0]
        assert values[best] == pytest.approx(max(values))


@pytest.mark.parametrize(("read_s", "token_s"), [(1e-3, 1e-6), (1e-6, 1e-3)])
def test_guesses_are_made_where_tokens_cost_little_beside_a_step_and_nowhere_else(
    read_s: float, token_s: float, decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, forward = ManualClock(), batch.forward

    def timed(model: Any, cache: Any, work: Sequence[batch.Work], kv: KvPolicy) -> Any:
        clock.advance(read_s + token_s * sum(piece.num_tokens for piece in work))
        return forward(model, cache, work, kv)

    monkeypatch.setattr(batch, "forward", timed)
    core = EngineCore(
        decoder.config,
        decoder.state_dict(),
        dtype=torch.float32,
        limits=CoreLimits(speculation=SpeculationLimits(kind=Speculation.LOOKUP)),
        grammars=byte_compiler(),
        clock=clock,
    )
    # Two letters: some guesses are right, and many are not.
    params = SamplingParams(max_tokens=120, grammar=Grammar(kind=GrammarKind.REGEX, text="[ab]+"))
    core.add(GenerateRequest(request_id="a", prompt_ids=tuple(b"ab" * 8), params=params))
    ended = finish(core)["a"]
    counters = core.counters
    assert len(ended.token_ids) == 120
    declined = dict(counters.undrafted).get(NoDraft.COST, 0)
    if token_s < read_s:
        assert counters.drafted_tokens > counters.accepted_tokens > 60
        assert declined == 0
        assert counters.num_steps < 120 / 2
    else:
        assert declined > 100
        assert counters.num_steps > 100


def test_costs_learn_the_line_that_was_measured() -> None:
    costs = StepCosts()
    for tokens in [1, 3, 5, 9, 2, 7] * 30:
        costs.saw(1, tokens, 0.010 + 0.002 * tokens)
    assert costs.predict(1, 1) == pytest.approx(0.012, rel=0.05)
    assert costs.predict(1, 9) == pytest.approx(0.028, rel=0.05)


def test_acceptance_follows_what_is_seen_and_drifts_back_when_idle() -> None:
    estimate = Acceptance(0.7)
    for _ in range(20):
        estimate.saw(0, 4)
    low = estimate.rate
    assert low < 0.2
    for _ in range(2000):
        estimate.idle()
    assert estimate.rate == pytest.approx(0.7, abs=0.01)
