"""Refuses requests that could never run, each with its value and its bound."""

from collections.abc import Sequence
from numbers import Integral
from typing import NamedTuple

from burnish.core.errors import UserError
from burnish.core.records import GenerateRequest, SamplingParams
from burnish.core.vocabulary import KvPolicyKind
from burnish.model.config import ModelConfig
from burnish.rollout.engine.adapters import AdapterSet
from burnish.rollout.engine.argument_types import check_each, check_types
from burnish.rollout.engine.grammar import GrammarCompiler
from burnish.rollout.engine.limits import CoreLimits

# More alternatives per token cost more to sort and to carry than they tell.
MAX_TOP_LOGPROBS = 64
# How long a request can be kept waiting grows with the levels above it.
_MAX_PRIORITY = 100


class Bounds(NamedTuple):
    """What requests must fit."""

    config: ModelConfig
    """Architecture."""
    limits: CoreLimits
    """Sizes of the engine."""
    can_decode: bool
    """Whether the engine can turn tokens into text."""
    grammars: GrammarCompiler | None
    """Compiles grammars; None if the engine was given no tokenizer to do it with."""
    adapters: AdapterSet
    """Those that requests can name."""
    attended_pages: int | None = None
    """Most pages that one token may attend, where memory holds only a part of the cache."""

    def max_length(self, request: GenerateRequest) -> int:
        """Most tokens of prompt and continuation."""
        wanted = len(request.prompt_ids) + request.params.max_tokens
        return min(wanted, self.config.max_position_embeddings)

    def stops(self, params: SamplingParams) -> frozenset[int]:
        """Stop tokens that the model can sample; a tokenizer may have more tokens than it."""
        return frozenset(t for t in params.stop_token_ids if 0 <= t < self.config.vocab_size)


def validate(request: GenerateRequest, bounds: Bounds) -> None:
    """Refuse a request that could never run.

    Raises:
        UserError: naming the value and its bound.
    """
    where = f"request {request.request_id}:"
    check_types(request)
    _check_prompt(request, bounds, where)
    _check_params(request.params, where)
    _check_stops(request.params, bounds, where)
    _check_features(request, bounds, where)
    page_size = bounds.limits.page_size
    needed = bounds.limits.kv.most_pages(
        len(request.prompt_ids),
        bounds.max_length(request),
        bounds.limits.budget_tokens,
        page_size,
    )
    if needed > bounds.limits.num_pages:
        raise UserError(
            f"{where} needs {needed} cache pages, the engine has {bounds.limits.num_pages}.",
            fix=f"raise num_pages to {needed} or lower max_tokens.",
        )

    attended, room = needed, bounds.attended_pages
    if bounds.limits.kv.kind is KvPolicyKind.QUEST and bounds.limits.kv.prefill_window:
        return
    if room is not None and attended > room:
        raise UserError(
            f"{where} attends {attended} cache pages at once, engine.kv.ram_mb holds {room}.",
            fix="raise engine.kv.ram_mb, or set engine.kv.policy to window, or to quest with "
            "engine.kv.prefill_window.",
        )


def check_ids(what: str, ids: Sequence[int], vocabulary: int) -> None:
    """Refuse what is not made of the model's tokens.

    Raises:
        UserError: naming the bound.
    """
    check_each(what, ids, Integral)
    if ids and not 0 <= min(ids) <= max(ids) < vocabulary:
        raise UserError(
            f"{what} has a token outside 0..{vocabulary - 1}.",
            fix="encode it with the model's own tokenizer.",
        )


def _check_prompt(request: GenerateRequest, bounds: Bounds, where: str) -> None:
    length, context = len(request.prompt_ids), bounds.config.max_position_embeddings
    only_scores = request.params.max_tokens == 0
    if length == 0:
        raise UserError(f"{where} the prompt is empty.", fix="give at least one token.")
    if length >= context + only_scores:
        raise UserError(
            f"{where} the prompt has {length} tokens, the model's context is {context}.",
            fix="shorten the prompt or drop old turns.",
        )
    check_ids(f"{where} the prompt", request.prompt_ids, bounds.config.vocab_size)
    if request.params.max_tokens < 0 or (only_scores and not request.prompt_logprobs):
        raise UserError(
            f"{where} max_tokens is {request.params.max_tokens}.",
            fix="ask for >= 1, or for 0 together with prompt_logprobs.",
        )


def _check_params(params: SamplingParams, where: str) -> None:
    if not 0.0 <= params.temperature < float("inf"):
        raise UserError(f"{where} temperature is {params.temperature}.", fix="use >= 0.")
    if not 0.0 < params.top_p <= 1.0:
        raise UserError(f"{where} top_p is {params.top_p}.", fix="use 0 < top_p <= 1.")
    if params.top_k < 0:
        raise UserError(f"{where} top_k is {params.top_k}.", fix="use >= 1, or 0 for all.")
    if not 0.0 <= params.min_p < 1.0:
        raise UserError(f"{where} min_p is {params.min_p}.", fix="use 0 <= min_p < 1.")
    if not 0 <= params.min_tokens <= params.max_tokens:
        raise UserError(
            f"{where} min_tokens is {params.min_tokens}, max_tokens {params.max_tokens}.",
            fix="use 0 <= min_tokens <= max_tokens.",
        )
    if not 0 <= params.num_top_logprobs <= MAX_TOP_LOGPROBS:
        raise UserError(
            f"{where} num_top_logprobs is {params.num_top_logprobs}.",
            fix=f"use 0..{MAX_TOP_LOGPROBS}.",
        )


def _check_stops(params: SamplingParams, bounds: Bounds, where: str) -> None:
    if params.min_tokens and len(bounds.stops(params)) == bounds.config.vocab_size:
        raise UserError(
            f"{where} min_tokens is {params.min_tokens}, but every token is a stop token.",
            fix="set min_tokens to 0, or name fewer stop tokens.",
        )
    if not all(params.stop):
        raise UserError(f"{where} a stop string is empty.", fix="leave it out.")
    if params.stop and not bounds.can_decode:
        raise UserError(
            f"{where} it has stop strings, but the engine was given no tokenizer.",
            fix="start the engine with `decode`, or use stop_token_ids.",
        )


def _check_features(request: GenerateRequest, bounds: Bounds, where: str) -> None:
    if abs(request.priority) > _MAX_PRIORITY:
        raise UserError(
            f"{where} priority is {request.priority}.",
            fix=f"use -{_MAX_PRIORITY}..{_MAX_PRIORITY}.",
        )
    if request.params.grammar is not None:
        if bounds.grammars is None:
            raise UserError(
                f"{where} it has a grammar, but the engine was given no tokenizer for it.",
                fix="start the engine with `grammars`, or leave the grammar out.",
            )
        bounds.grammars.compile(request.params.grammar, bounds.stops(request.params))
    bounds.adapters.get(request.adapter)
