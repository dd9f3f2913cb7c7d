"""One forward over the work of a step, and what is read off its hidden states.

Shapes: T tokens of the step, N sequences that sample, E hidden width, V vocabulary.
"""

import math
from collections.abc import Sequence as Seq
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from burnish.rollout.engine.cache.step import Span
from burnish.rollout.engine.cache.storage import KvCache
from burnish.rollout.engine.long.layout import attention_of
from burnish.rollout.engine.long.policy import KvPolicy
from burnish.rollout.engine.sampler import Draw, Sampled, sample, uniform
from burnish.rollout.engine.score import logprobs_of
from burnish.rollout.engine.sequence import Sequence
from burnish.rollout.engine.weights import ServedModel


class Work(NamedTuple):
    """What one sequence computes in this step."""

    sequence: Sequence
    """Holds pages for all of it."""
    num_tokens: int
    """The next tokens that are not in the cache."""


def forward(model: ServedModel, cache: KvCache, work: Seq[Work], kv: KvPolicy) -> Tensor:
    """Hidden states [T, E] of all tokens, attended by `kv`; single tokens must come first."""
    spans = [_span(s, n) for s, n in work]
    ids_T = torch.tensor(
        [
            token
            for (sequence, _), span in zip(work, spans, strict=True)
            for token in sequence.tokens[span.start : span.end]
        ]
    )
    positions_T = torch.tensor([p for span in spans for p in range(span.start, span.end)])
    return model.hidden(ids_T, positions_T, attention_of(cache, [s for s, _ in work], spans, kv))


def prompt_logprobs(model: ServedModel, hidden_TE: Tensor, work: Seq[Work]) -> list[Sequence]:
    """Extend the prompt log-probs that were asked for; returns those whose numbers are none."""
    broken = []
    for (sequence, num_tokens), end in zip(work, accumulate(n for _, n in work), strict=True):
        if not sequence.wants_prompt:
            continue
        known = sequence.prompt_logprobs or [0.0]
        # Row r predicts token r + 1. What a preempted sequence computes again is known already.
        first = max(len(known) - 1, sequence.num_computed)
        last = min(sequence.num_computed + num_tokens, sequence.num_prompt - 1)
        if first < last:
            offset = end - num_tokens - sequence.num_computed
            rows_NE = hidden_TE[first + offset : last + offset]
            targets_N = torch.tensor(sequence.tokens[first + 1 : last + 1])
            known = known + logprobs_of(model, rows_NE, targets_N)
        sequence.prompt_logprobs = known
        if not all(map(math.isfinite, known)):
            broken.append(sequence)
    return broken


def last_rows(hidden_TE: Tensor, work: Seq[Work], chosen: Seq[int]) -> Tensor:
    """Hidden states [N, E] of the last token of the chosen pieces of work."""
    if len(chosen) == len(work) == len(hidden_TE):
        return hidden_TE
    ends = list(accumulate(n for _, n in work))
    return hidden_TE[torch.tensor([ends[i] - 1 for i in chosen])]


def sample_next(model: ServedModel, hidden_NE: Tensor, sequences: Seq[Sequence]) -> Sampled:
    """Draw the next token of each sequence."""
    logits_NV = model.logits(hidden_NE)
    for row, sequence in enumerate(sequences):
        if not sequence.may_stop and sequence.stops:
            stops = [token for token in sequence.stops if 0 <= token < logits_NV.shape[1]]
            logits_NV[row, stops] = -torch.inf
    return sample(logits_NV, [_draw(sequence) for sequence in sequences])


def _span(sequence: Sequence, num_tokens: int) -> Span:
    pages, start = sequence.pages, sequence.num_computed
    kept = [i for i, page in enumerate(pages) if page >= 0]
    # Pages side by side: the kernel would walk over what is missing.
    return Span(pages, start, start + num_tokens, None if len(kept) == len(pages) else kept)


def _draw(sequence: Sequence) -> Draw:
    params = sequence.request.params
    return Draw(
        params.temperature,
        params.top_p,
        uniform(sequence.seed_key, len(sequence.tokens)),
        params.top_k,
        params.min_p,
        params.num_top_logprobs,
    )
