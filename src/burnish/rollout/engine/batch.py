"""One forward over the work of a step, and what is read off its hidden states.

Shapes: T tokens of the step, N sequences that sample, E hidden width, V vocabulary.
"""

import math
from collections.abc import Sequence as Seq
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from burnish.model.lora import AdaptedRows
from burnish.rollout.engine.cache.step import Span
from burnish.rollout.engine.cache.storage import KvCache
from burnish.rollout.engine.long.layout import attention_of
from burnish.rollout.engine.long.policy import KvPolicy
from burnish.rollout.engine.score import logprobs_of
from burnish.rollout.engine.sequence import Sequence
from burnish.rollout.engine.speculation.drafter import Draft
from burnish.rollout.engine.weights import ServedModel

_NO_DRAFT = Draft(())


class Work(NamedTuple):
    """What one sequence computes in this step."""

    sequence: Sequence
    """Holds pages for all of it."""
    num_tokens: int
    """The next tokens that are not in the cache, drafted ones included."""
    draft: Draft = _NO_DRAFT
    """Guesses that follow the last known token, if that is computed now."""

    @property
    def num_known(self) -> int:
        """Of the tokens, those that are no guesses."""
        return self.num_tokens - len(self.draft.tokens)


def arranged(work: Seq[Work]) -> list[Work]:
    """Pieces of one token first, those of one adapter together."""
    return sorted(work, key=lambda w: (w.num_tokens > 1, w.sequence.request.adapter or ""))


def forward(model: ServedModel, cache: KvCache, work: Seq[Work], kv: KvPolicy) -> Tensor:
    """Hidden states [T, E] of all tokens, attended by `kv`; pieces of one token must come first."""
    spans = [_span(w.sequence, w.num_tokens) for w in work]
    ids: list[int] = []
    for (sequence, _, draft), span in zip(work, spans, strict=True):
        ids += sequence.tokens[span.start : span.end]
        ids += draft.tokens
    positions_T = torch.tensor([p for span in spans for p in range(span.start, span.end)])
    attend = attention_of(cache, [w.sequence for w in work], spans, kv)
    return model.hidden(torch.tensor(ids), positions_T, attend, adapters=_adapters(work))


def prompt_logprobs(model: ServedModel, hidden_TE: Tensor, work: Seq[Work]) -> list[Sequence]:
    """Extend the prompt log-probs that were asked for; returns those whose numbers are none."""
    broken = []
    ends = accumulate(w.num_tokens for w in work)
    for (sequence, num_tokens, _), end in zip(work, ends, strict=True):
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


def _span(sequence: Sequence, num_tokens: int) -> Span:
    pages, start = sequence.pages, sequence.num_computed
    kept = [i for i, page in enumerate(pages) if page >= 0]
    # Pages side by side: the kernel would walk over what is missing.
    return Span(pages, start, start + num_tokens, None if len(kept) == len(pages) else kept)


def _adapters(work: Seq[Work]) -> list[AdaptedRows]:
    """Rows that go through adapters; neighbours of the same one together."""
    found: list[AdaptedRows] = []
    end = 0
    for piece in work:
        start, end = end, end + piece.num_tokens
        adapter = piece.sequence.adapter
        if adapter is None:
            continue
        if found and found[-1].stop == start and found[-1].layers is adapter.layers:
            start = found.pop().start
        found.append(AdaptedRows(start, end, adapter.layers))
    return found
