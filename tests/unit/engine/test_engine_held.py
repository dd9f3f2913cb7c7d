"""Sampling held to a grammar inside the engine: masks, both log-probs, ends, guesses, failures."""

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from burnish.core.errors import UserError
from burnish.core.records import Failure, GenerateRequest, Generation, Grammar
from burnish.core.vocabulary import FailureKind, GrammarKind, Speculation, StopReason
from burnish.model.decoder import Decoder
from burnish.rollout.engine import masks
from burnish.rollout.engine.engine import EngineCore
from burnish.rollout.engine.grammar import GrammarCompiler, GrammarLimitError
from burnish.rollout.engine.limits import CoreLimits, SpeculationLimits
from burnish.rollout.engine.speculation.lengths import Prices

Ask = Callable[..., GenerateRequest]
VOCAB, STOP = 300, 256
PATTERN = "(ab|cd){3,5}x?"


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    """A byte-level tokenizer without merges: token n is byte n."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = pre_tokenizers.ByteLevel.alphabet()
    printable = [b for b in range(256) if 33 <= b <= 126 or 161 <= b <= 172 or 174 <= b <= 255]
    spare = iter(range(256, 512))
    names = [chr(b) if b in printable else chr(next(spare)) for b in range(256)]
    assert set(names) == set(letters)
    tokenizer = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    assert tokenizer.token_to_id("<|end|>") == STOP
    return GrammarCompiler(tokenizer.to_str(), VOCAB)


def regex(text: str) -> Grammar:
    return Grammar(kind=GrammarKind.REGEX, text=text)


def core_for(
    decoder: Decoder, compiler: GrammarCompiler | None, kind: Speculation = Speculation.OFF
) -> EngineCore:
    core = EngineCore(
        decoder.config,
        decoder.state_dict(),
        dtype=torch.float32,
        limits=CoreLimits(
            num_pages=100, page_size=4, speculation=SpeculationLimits(kind=kind, max_tokens=4)
        ),
        grammars=compiler,
    )
    if core._speculator is not None:
        core._speculator._prices = lambda *_: Prices(1.0, 1e-9)  # type: ignore[method-assign]
    return core


def run(core: EngineCore, *requests: GenerateRequest) -> dict[str, Any]:
    for request in requests:
        core.add(request)
    ended: dict[str, Any] = {}
    while core.has_work:
        ended |= {s.request.request_id: outcome for s, outcome in core.step()}
        core.check()
    return ended


def text_of(generation: Generation) -> str:
    return bytes(token for token in generation.token_ids if token < 256).decode()


def test_text_is_of_the_grammar_and_neighbours_keep_their_tokens(
    decoder: Decoder, compiler: GrammarCompiler, request_for: Ask
) -> None:
    free = [request_for(f"free{i}", [i, 2, 3], max_tokens=12, seed=i) for i in range(3)]
    alone = run(core_for(decoder, compiler), *free)
    held = [
        request_for(f"h{i}", [1, 2], max_tokens=40, seed=i, grammar=regex(PATTERN), **params)
        for i, params in enumerate(
            [{}, {"temperature": 0.0}, {"top_k": 2}, {"stop_token_ids": (STOP,)}]
        )
    ]
    found = run(core_for(decoder, compiler), *free, *held)
    for request in free:
        assert found[request.request_id].token_ids == alone[request.request_id].token_ids
        assert found[request.request_id].unmasked_logprobs == ()
    for request in held:
        generation = found[request.request_id]
        assert generation.stop_reason is StopReason.STOP
        assert re.fullmatch(PATTERN, text_of(generation))
    assert found["h3"].token_ids[-1] == STOP


def test_log_probs_are_reported_under_both_policies(
    decoder: Decoder,
    compiler: GrammarCompiler,
    dense_logprobs: Callable[[Decoder, list[int]], torch.Tensor],
    request_for: Ask,
) -> None:
    request = request_for(
        "a", [1, 2], max_tokens=40, seed=3, grammar=regex("[a-d]{6}"), temperature=0.7
    )
    generation = run(core_for(decoder, compiler), request)["a"]
    tokens = [1, 2, *generation.token_ids]
    raw = dense_logprobs(decoder, tokens)[1:-1]
    letters = torch.tensor([ord(c) for c in "abcd"])
    for place, token in enumerate(generation.token_ids):
        row = raw[place] / 0.7
        unmasked = float(row[token] - row.logsumexp(-1))
        masked = float(row[token] - row[letters].logsumexp(-1))
        assert generation.unmasked_logprobs[place] == pytest.approx(unmasked, abs=1e-4)
        assert generation.logprobs[place] == pytest.approx(masked, abs=1e-4)


@pytest.mark.parametrize("kind", [Speculation.LOOKUP, Speculation.SELF])
def test_guesses_change_nothing_under_a_grammar(
    kind: Speculation, decoder: Decoder, compiler: GrammarCompiler, request_for: Ask
) -> None:
    prompt = list(b"abcdabcdabcdabcd")
    requests = [
        request_for(f"r{i}", prompt, max_tokens=24, seed=i, grammar=regex("(ab|cd)+"))
        for i in range(4)
    ]
    plain = run(core_for(decoder, compiler), *requests)
    core = core_for(decoder, compiler, kind)
    found = run(core, *requests)
    assert core.counters.drafted_tokens > 0
    for name, generation in plain.items():
        assert found[name].token_ids == generation.token_ids
        assert found[name].logprobs == pytest.approx(generation.logprobs, abs=1e-4)
        assert found[name].unmasked_logprobs == pytest.approx(
            generation.unmasked_logprobs, abs=1e-4
        )
    if kind is Speculation.LOOKUP:
        assert core.counters.accepted_tokens > 0


def test_a_text_that_can_only_end_ends_before_min_tokens(
    decoder: Decoder, compiler: GrammarCompiler, request_for: Ask
) -> None:
    params = {"max_tokens": 20, "min_tokens": 9, "grammar": regex("abc")}
    found = run(
        core_for(decoder, compiler),
        request_for("none", [1], **params),
        request_for("stop", [1], stop_token_ids=(STOP,), **params),
    )
    assert found["none"].token_ids == tuple(b"abc")
    assert found["stop"].token_ids == (*b"abc", STOP)


def test_a_text_too_much_for_its_grammar_fails_alone(
    decoder: Decoder,
    compiler: GrammarCompiler,
    request_for: Ask,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real, calls = masks.allowed_together, 0

    def limited(states: Any, executor: Any) -> Any:
        nonlocal calls
        calls += 1
        return [GrammarLimitError("too many items")] if calls == 3 else real(states, executor)

    monkeypatch.setattr(masks, "allowed_together", limited)
    core = core_for(decoder, compiler)
    found = run(
        core,
        request_for("a", [1], max_tokens=9, grammar=regex("[a-z]{9}")),
        request_for("b", [2], max_tokens=9),
    )
    assert isinstance(found["a"], Failure)
    assert found["a"].kind is FailureKind.POLICY
    assert "too many items" in found["a"].message
    assert len(found["b"].token_ids) == 9
    assert core.counters.num_failed == 1


def test_bad_grammars_and_engines_without_a_tokenizer_refuse(
    decoder: Decoder, compiler: GrammarCompiler, request_for: Ask
) -> None:
    schema = Grammar(kind=GrammarKind.JSON_SCHEMA, text=json.dumps({"type": "integer"}))
    with pytest.raises(UserError, match="no tokenizer"):
        core_for(decoder, None).add(request_for("a", [1], grammar=schema))
    with pytest.raises(UserError, match="cannot be used"):
        core_for(decoder, compiler).add(request_for("a", [1], grammar=regex("(")))


def test_where_masks_are_made_changes_nothing(
    decoder: Decoder, compiler: GrammarCompiler, request_for: Ask
) -> None:
    patterns = ("(ab|cd)+", "[a-z]{9}", "abc", "[0-9]+x")
    requests = [
        request_for(f"r{i}", [1, i + 1], max_tokens=12, seed=i, grammar=regex(patterns[i % 4]))
        for i in range(9)
    ]
    found = []
    for num_spare in (0, 1, 3):
        core = core_for(decoder, compiler)
        core._stepper.masks = masks.MaskMaker(num_spare)
        found.append(run(core, *requests))
        core.close()
    assert found[0] == found[1] == found[2]
    assert all(isinstance(each, Generation) for each in found[0].values())


def test_a_guess_may_complete_a_text_that_no_stop_token_follows(
    decoder: Decoder, compiler: GrammarCompiler, request_for: Ask
) -> None:
    """Behind it nothing is allowed at all: that is an end, not a failure."""
    request = request_for("a", list(b"abcdefgh" * 3), max_tokens=24, grammar=regex("abcdefgh"))
    plain = run(core_for(decoder, compiler), request)["a"]
    core = core_for(decoder, compiler, Speculation.LOOKUP)
    found = run(core, request)["a"]
    assert core.counters.accepted_tokens > 0
    assert isinstance(found, Generation)
    assert (text_of(found), found.stop_reason) == ("abcdefgh", StopReason.STOP)
    assert found.token_ids == plain.token_ids


def test_a_text_that_the_model_has_no_token_for_fails_alone(
    decoder: Decoder, compiler: GrammarCompiler, request_for: Ask
) -> None:
    """Byte 0 is what the library takes for the end of this tokenizer: it is never sampled."""
    core = core_for(decoder, compiler)
    found = run(
        core,
        request_for("a", [1], max_tokens=9, grammar=regex("a\x00b")),
        request_for("b", [2], max_tokens=9),
    )
    assert isinstance(found["a"], Failure)
    assert found["a"].kind is FailureKind.POLICY
    assert "no token of the model" in found["a"].message
    assert len(found["b"].token_ids) == 9
    assert core.free_pages == core.limits.num_pages


def test_a_grammar_of_the_empty_text_needs_a_stop_token(
    decoder: Decoder, compiler: GrammarCompiler, request_for: Ask
) -> None:
    core = core_for(decoder, compiler)
    empty = {"max_tokens": 9, "grammar": regex("")}
    with pytest.raises(UserError, match="only the empty text"):
        core.add(request_for("a", [1], **empty))
    found = run(core, request_for("b", [1], stop_token_ids=(STOP,), **empty))["b"]
    assert found.token_ids == (STOP,)


@pytest.mark.parametrize("unknown", [10**6, -7])
def test_a_stop_token_that_the_model_lacks_changes_nothing_under_a_grammar(
    unknown: int, decoder: Decoder, compiler: GrammarCompiler, request_for: Ask
) -> None:
    params = {"max_tokens": 9, "grammar": regex("a{1,3}b"), "seed": 3}
    found = run(
        core_for(decoder, compiler),
        request_for("a", [1], stop_token_ids=(unknown,), **params),
        request_for("b", [1], **params),
    )
    assert found["a"].token_ids == found["b"].token_ids
    assert found["a"].stop_reason is found["b"].stop_reason is StopReason.STOP
