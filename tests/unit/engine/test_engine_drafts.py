"""Draft models while weights change, and what is tried so that costs are known."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from engine_traffic import byte_compiler

from burnish.core.clock import ManualClock
from burnish.core.records import GenerateRequest, Generation, Grammar, SamplingParams
from burnish.core.vocabulary import GrammarKind, InFlight, NoDraft, Speculation
from burnish.model.decoder import Decoder
from burnish.rollout.engine import batch
from burnish.rollout.engine.engine import EngineCore
from burnish.rollout.engine.limits import CoreLimits, SpeculationLimits
from burnish.rollout.engine.long.policy import KvPolicy
from burnish.rollout.engine.speculation.costs import StepCosts
from burnish.rollout.engine.speculation.lengths import Prices
from burnish.rollout.engine.speculation.opening import DraftSource

Ask = Callable[..., GenerateRequest]
Build = Callable[..., Decoder]
LOOP = [3, 5, 7, 11] * 6


def core_for(decoder: Decoder, draft: Decoder | None, max_lag: int | None = 0) -> EngineCore:
    """Guesses always, where there is a draft model."""
    kind = Speculation.OFF if draft is None else Speculation.DRAFT
    core = EngineCore(
        decoder.config,
        decoder.state_dict(),
        dtype=torch.float32,
        limits=CoreLimits(
            num_pages=200,
            page_size=4,
            speculation=SpeculationLimits(kind=kind, max_tokens=4, max_lag=max_lag),
        ),
        draft=None if draft is None else DraftSource(draft.config, draft.state_dict()),
    )
    if core._speculator is not None:
        core._speculator._prices = lambda *_: Prices(1.0, 1e-9)  # type: ignore[method-assign]
    return core


def finish(core: EngineCore) -> dict[str, Any]:
    ended: dict[str, Any] = {}
    while core.has_work:
        ended |= {s.request.request_id: outcome for s, outcome in core.step()}
        core.check()
    return ended


def first_layers(decoder: Decoder, build: Build, num_layers: int) -> Decoder:
    """A model of its own, made of another's first layers."""
    part, whole = build(num_layers=num_layers), decoder.state_dict()
    part.load_state_dict({name: whole[name] for name in part.state_dict()})
    return part


@pytest.mark.parametrize("num_layers", [1, 3])
def test_a_draft_made_of_the_targets_weights_follows_every_update(
    num_layers: int, decoder: Decoder, make_decoder: Build, request_for: Ask
) -> None:
    core = core_for(decoder, first_layers(decoder, make_decoder, num_layers))
    newer = make_decoder(seed=1)
    core.update_weights(newer.state_dict(), 7)
    opened_anew = core_for(newer, first_layers(newer, make_decoder, num_layers))
    for each in (core, opened_anew):
        each.add(request_for("a", LOOP[:6], max_tokens=40, seed=1))
        finish(each)
    assert NoDraft.STALE not in dict(core.counters.undrafted)
    assert core.counters.drafted_tokens == opened_anew.counters.drafted_tokens > 0
    assert core.counters.accepted_tokens == opened_anew.counters.accepted_tokens
    if num_layers == 3:
        assert core.counters.accepted_tokens == core.counters.drafted_tokens


@pytest.mark.parametrize("inflight", [InFlight.KEEP, InFlight.RECOMPUTE])
def test_a_stale_draft_is_right_less_often_and_tokens_stay_the_same(
    inflight: InFlight, decoder: Decoder, make_decoder: Build, request_for: Ask
) -> None:
    apart = make_decoder(seed=0)
    with torch.no_grad():
        # As good as the target's weights, but not the same: nothing to follow.
        apart.norm.weight.mul_(1.0001)
    newer = make_decoder(seed=1).state_dict()
    found = []
    for core in (core_for(decoder, None), core_for(decoder, apart, None)):
        core.add(request_for("before", LOOP, max_tokens=40, seed=1))
        finish(core)
        fresh = core.counters
        core.add(request_for("across", LOOP[:7], max_tokens=60, seed=2))
        while not core.running or core.running[0].num_sampled < 9:
            core.step()
        # The same place for both: guesses make steps longer, so tokens are counted.
        while core.running[0].num_sampled < 20:
            core.step()
        at = core.running[0].num_sampled
        core.update_weights(newer, 1, inflight)
        core.add(request_for("after", LOOP[:9], max_tokens=40, seed=3))
        found.append((finish(core), at, fresh, core.counters))
    (plain, _, _, _), (guessed, at, fresh, last) = found
    assert guessed["after"].token_ids == plain["after"].token_ids
    assert guessed["across"].weight_versions == (0,) * at + (1,) * (60 - at)
    assert guessed["across"].token_ids[:20] == plain["across"].token_ids[:20]
    assert fresh.accepted_tokens > 0.9 * fresh.drafted_tokens > 0
    drafted = last.drafted_tokens - fresh.drafted_tokens
    accepted = last.accepted_tokens - fresh.accepted_tokens
    assert accepted < 0.5 * drafted


def test_a_text_longer_than_the_draft_models_context_says_so(
    decoder: Decoder, make_decoder: Build, request_for: Ask
) -> None:
    core = core_for(decoder, make_decoder(max_position_embeddings=32))
    core.add(request_for("a", LOOP, max_tokens=20))
    ended = finish(core)["a"]
    assert isinstance(ended, Generation)
    assert len(ended.token_ids) == 20
    assert dict(core.counters.undrafted)[NoDraft.CONTEXT] > 0
    assert NoDraft.NO_MATCH not in dict(core.counters.undrafted)


class Timed:
    """An engine whose forwards take what a formula says; half of its guesses are right."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        decoder: Decoder,
        seconds: Callable[[int], float],
        num_rows: int,
        num_tokens: int,
    ) -> None:
        clock, forward = ManualClock(), batch.forward
        self.steps: list[tuple[int, float, bool]] = []
        """Guesses, seconds, and whether they were made to learn what they cost."""

        def timed(model: Any, cache: Any, work: Sequence[batch.Work], kv: KvPolicy) -> Any:
            num_tokens = sum(piece.num_tokens for piece in work)
            clock.advance(seconds(num_tokens))
            if all(piece.num_known == 1 for piece in work):
                speculator = self.core._speculator
                assert speculator is not None
                is_trial = speculator._is_exploring
                self.steps.append((num_tokens - len(work), seconds(num_tokens), is_trial))
            return forward(model, cache, work, kv)

        monkeypatch.setattr(batch, "forward", timed)
        self.core = EngineCore(
            decoder.config,
            decoder.state_dict(),
            dtype=torch.float32,
            limits=CoreLimits(speculation=SpeculationLimits(kind=Speculation.LOOKUP)),
            grammars=byte_compiler(),
            clock=clock,
        )
        for i in range(num_rows):
            params = SamplingParams(
                max_tokens=num_tokens, seed=i, grammar=Grammar(kind=GrammarKind.REGEX, text="[ab]+")
            )
            prompt = tuple(b"ab" * 8)
            self.core.add(GenerateRequest(request_id=f"{i}", prompt_ids=prompt, params=params))
        finish(self.core)


def test_costs_that_were_assumed_too_high_are_found_out(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What is assumed of 64 sequences makes a guess that is right in 70 % cost more than it brings.
    assert StepCosts().predict(64, 65) / StepCosts().predict(64, 64) > 1 + 0.7 / 64
    timed = Timed(monkeypatch, decoder, lambda tokens: 1e-3 + 1e-8 * tokens, 64, 50)
    first = next(i for i, (guesses, _, _) in enumerate(timed.steps) if guesses)
    assert timed.steps[first][2]
    assert 0 < timed.steps[first][0] <= 8
    later = [guesses for guesses, _, _ in timed.steps[first + 2 : first + 12]]
    assert sum(later) > 64 * len(later)


def test_trying_takes_a_small_share_of_the_time(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed = Timed(monkeypatch, decoder, lambda tokens: 1e-6 + 1e-3 * tokens, 2, 200)
    tried = [seconds for _, seconds, is_trial in timed.steps if is_trial]
    assert tried
    # The last one may begin just within the share.
    assert sum(tried) <= sum(seconds for _, seconds, _ in timed.steps) / 64 + max(tried)
