"""Random requests of every kind, and a slow reference that recomputes each token from nothing.

The reference shares with the engine only the distribution's truncation and the grammar library:
no cache, no batch, no guesses, adapters merged into the weights.
"""

import random
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from burnish.core.records import GenerateRequest, Generation, Grammar, SamplingParams
from burnish.core.vocabulary import GrammarKind, StopReason
from burnish.model.config import ModelConfig
from burnish.model.decoder import Decoder
from burnish.model.lora import Lora, LowRank, merged
from burnish.rollout.engine.grammar import GrammarCompiler, GrammarState
from burnish.rollout.engine.sampler import Draw, sample, seed_key, uniform

VOCAB, END = 300, 256
ADAPTERS = ("red", "blue")
# Float32 sums of some hundred terms near 10: eps * 10 * sqrt(300) is 2e-5, with margin.
TOLERANCE = 1e-4
# What a uniform or a bound may be off for the same token, by the same sums.
_NEAR = 1e-5
GRAMMARS = (
    Grammar(kind=GrammarKind.REGEX, text="(ab|cd){2,6}x?"),
    Grammar(kind=GrammarKind.REGEX, text="[a-f]+(,[a-f]+)*"),
    Grammar(kind=GrammarKind.REGEX, text="abababab"),
    Grammar(
        kind=GrammarKind.JSON_SCHEMA,
        text='{"type":"object","properties":{"a":{"type":"integer"}},"required":["a"],'
        '"additionalProperties":false}',
    ),
)


def byte_compiler() -> GrammarCompiler:
    """A byte-level tokenizer without merges: token n is byte n, END is special."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    printable = [b for b in range(256) if 33 <= b <= 126 or 161 <= b <= 172 or 174 <= b <= 255]
    spare = iter(range(256, 512))
    names = [chr(b) if b in printable else chr(next(spare)) for b in range(256)]
    tokenizer = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    return GrammarCompiler(tokenizer.to_str(), VOCAB)


def text_of(ids: Sequence[int]) -> str:
    """One character for each byte; others have none."""
    return bytes(token for token in ids if token < 256).decode("latin-1")


def lora_for(config: ModelConfig, seed: int) -> Lora:
    """Rank 2 beside two matrices of every layer."""
    generator = torch.Generator().manual_seed(1000 + seed)

    def low(outputs: int, inputs: int) -> LowRank:
        return LowRank(
            0.2 * torch.randn(2, inputs, generator=generator),
            0.2 * torch.randn(outputs, 2, generator=generator),
        )

    rows = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    hidden, wide = config.hidden_size, config.intermediate_size
    return Lora(
        tuple(
            {"qkv": low(rows, hidden), "down": low(hidden, wide)} for _ in range(config.num_layers)
        )
    )


def random_request(
    rng: random.Random, number: int, stems: Sequence[Sequence[int]], adapters: Sequence[str]
) -> GenerateRequest:
    """A request that draws on every feature."""
    stem = rng.choice(stems)
    prompt = list(stem[: rng.randrange(1, len(stem) + 1)])
    if rng.random() < 0.5:
        prompt += [rng.randrange(VOCAB) for _ in range(rng.randrange(4))]
    scores_prompt = rng.random() < 0.15
    only_scores = scores_prompt and rng.random() < 0.5
    most = 0 if only_scores else rng.randrange(1, 25)
    grammar = rng.choice(GRAMMARS) if rng.random() < 0.3 else None
    stops: tuple[int, ...] = (END,) if grammar is not None and rng.random() < 0.6 else ()
    if grammar is None and rng.random() < 0.3:
        stops = tuple(rng.sample(range(VOCAB), 20)) + ((10**6,) if rng.random() < 0.2 else ())
    return GenerateRequest(
        request_id=f"{rng.choice('ab')}/{number}",
        prompt_ids=tuple(prompt),
        priority=rng.randrange(-1, 3),
        session_id=rng.choice([None, None, f"s{rng.randrange(5)}"]),
        adapter=rng.choice([None, *adapters]) if rng.random() < 0.6 else None,
        prompt_logprobs=scores_prompt,
        params=SamplingParams(
            max_tokens=most,
            temperature=rng.choice([0.0, 0.1, 0.8, 1.0, 1.5]),
            top_k=rng.choice([0, 0, 0, 7]),
            top_p=rng.choice([1.0, 1.0, 0.9]),
            min_p=rng.choice([0.0, 0.0, 0.05]),
            seed=rng.randrange(1000),
            stop_token_ids=stops,
            stop=rng.choice([(), (), ("a", "\x03\x05"), ("b", "ab", "1")]),
            min_tokens=rng.randrange(most + 1) if rng.random() < 0.3 else 0,
            num_top_logprobs=rng.choice([0, 0, 3]),
            grammar=grammar,
        ),
    )


class Weights(NamedTuple):
    """What was served from one version on."""

    base: Mapping[str, Tensor]
    """Of the model."""
    adapters: Mapping[str, Lora]
    """By name."""


class Reference:
    """Recomputes what the engine said. `served[v]` is what was there when version v came."""

    def __init__(self, config: ModelConfig, dense: Any, compiler: GrammarCompiler) -> None:
        """Nothing served; `dense` gives log-probs [T, V] by a full masked softmax."""
        self._config, self._dense, self._compiler = config, dense, compiler
        self.served: dict[int, Weights] = {}

    def check(self, request: GenerateRequest, got: Generation) -> None:
        """Assert that every token, log-prob and the end are those of the reference."""
        ids, params = [*request.prompt_ids, *got.token_ids], request.params
        rows = {v: self._rows(v, request.adapter, ids) for v in {*got.weight_versions}}
        stops = frozenset(t for t in params.stop_token_ids if 0 <= t < VOCAB)
        state = params.grammar and self._compiler.compile(params.grammar, stops)
        assert len(got.top_logprobs) == (len(got.token_ids) if params.num_top_logprobs else 0)
        assert len(got.unmasked_logprobs) == (len(got.token_ids) if state else 0)
        reason = None
        for i, version in enumerate(got.weight_versions):
            assert reason is None, f"{request.request_id} went on after {reason}"
            place = len(request.prompt_ids) + i
            row_V = rows[version][place - 1].clone()
            self._check_token(request, got, i, place, row_V, state, stops)
            reason = self._reason(request, got.token_ids[: i + 1], state, stops)
        if got.stop_reason is not StopReason.ABORTED:
            assert got.stop_reason is (reason or StopReason.LENGTH)
            assert reason is not None or params.max_tokens == len(got.token_ids) == 0
            if request.prompt_logprobs:
                self._check_prompt(request, got)

    def _rows(self, version: int, adapter: str | None, ids: list[int]) -> Tensor:
        served = self.served[version]
        decoder = Decoder(self._config)
        state = served.base
        if adapter is not None:
            state = merged(state, served.adapters[adapter])
        decoder.load_state_dict(state)
        rows: Tensor = self._dense(decoder.eval(), ids)
        return rows

    def _check_token(
        self,
        request: GenerateRequest,
        got: Generation,
        i: int,
        place: int,
        row_V: Tensor,
        state: GrammarState | None,
        stops: frozenset[int],
    ) -> None:
        params, token = request.params, got.token_ids[i]
        warmth = params.temperature or 1.0
        if state is not None:
            unmasked = (row_V / warmth).log_softmax(-1)[token]
            assert got.unmasked_logprobs[i] == pytest.approx(
                float(unmasked), abs=TOLERANCE / warmth
            )
            allowed_V = state.allowed()
            row_V[~allowed_V] = -torch.inf
        if i < params.min_tokens and not torch.isneginf(without(row_V, stops)).all():
            row_V = without(row_V, stops)
        number = uniform(seed_key(params.seed), place)
        found = []
        # At a boundary, of the draw or of what is kept, the last bits decide.
        for shift, kept in product((0.0, -_NEAR, _NEAR), repeat=2):
            draw = Draw(
                params.temperature,
                params.top_p if params.top_p == 1.0 else params.top_p + kept,
                min(max(number + shift, 0.0), 1.0 - 2.0**-53),
                params.top_k,
                params.min_p * (1.0 + kept),
                params.num_top_logprobs,
            )
            drawn = sample(row_V[None], [draw])
            found.append((drawn.tokens[0], drawn.logprobs[0]))
        logprobs = [value for each, value in found if each == token]
        assert logprobs, (request, i, found, token)
        assert any(got.logprobs[i] == pytest.approx(x, abs=TOLERANCE / warmth) for x in logprobs)
        if state is not None:
            state.advance(token)

    def _reason(
        self,
        request: GenerateRequest,
        tokens: Sequence[int],
        state: GrammarState | None,
        stops: frozenset[int],
    ) -> StopReason | None:
        params = request.params
        before, now = text_of(tokens[:-1]), text_of(tokens)
        ended = len(tokens) >= params.min_tokens and any(
            now.find(stop, max(0, len(before) - len(stop) + 1)) >= 0 for stop in params.stop
        )
        if tokens[-1] in stops or ended or (state and not stops and state.is_complete):
            return StopReason.STOP
        length = len(request.prompt_ids) + len(tokens)
        is_full = length == self._config.max_position_embeddings
        return StopReason.LENGTH if is_full or len(tokens) == params.max_tokens else None

    def _check_prompt(self, request: GenerateRequest, got: Generation) -> None:
        prompt = list(request.prompt_ids)
        candidates = []
        for version in self.served:
            if request.adapter and request.adapter not in self.served[version].adapters:
                continue
            rows = self._rows(version, request.adapter, prompt)
            chosen = [float(rows[i, token]) for i, token in enumerate(prompt[1:])]
            candidates.append([0.0, *chosen])
        # All from one version of the weights, never a mixture.
        assert any(got.prompt_logprobs == pytest.approx(c, abs=TOLERANCE) for c in candidates)


def without(row_V: Tensor, stops: frozenset[int]) -> Tensor:
    """The row with the stop tokens impossible."""
    row_V = row_V.clone()
    row_V[list(stops)] = -torch.inf
    return row_V
