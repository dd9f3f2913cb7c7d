r"""How each piece of a step attends under a policy.

    step --> whole pieces      KvCache.attend      all pages it holds, or a window of them
         \-> selecting pieces  KvCache.attend_chosen: bounds -> top pages per head -> those alone
         \-> observed tokens   KvCache.mass        how much of their attention falls on each page

Shapes: T tokens, B rows, H query heads, K key/value heads, G = H / K, D head width, W pages of a
row, N pages chosen.
"""

from collections.abc import Sequence as Seq
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from burnish.core.vocabulary import KvPolicyKind
from burnish.model.decoder import Attend
from burnish.rollout.engine.cache.step import Choice, Span, Step, Visibility
from burnish.rollout.engine.cache.storage import KvCache, StepAttend
from burnish.rollout.engine.long.choice import choose_pages
from burnish.rollout.engine.long.policy import OBSERVED_TOKENS, TAIL_TOKENS, KvPolicy


class Weighed(Protocol):
    """What a policy must know of a sequence, and where it notes the mass of its pages."""

    page_mass: list[float]
    num_prompt: int


class _Selection(NamedTuple):
    """A piece that selects its pages."""

    past_W: Tensor
    """Pages before its own, int32."""
    own: Tensor
    """Its own pages, int32."""
    start: int
    """Offset of its first token in the first of them."""
    rows: slice
    """Its tokens in the flat batch."""


class _Observed(NamedTuple):
    """Tokens of one sequence whose attention is measured."""

    sequence: Weighed
    rows: Tensor
    """In the flat batch."""
    places: list[int]
    """Among the keys of `table`."""
    table: Tensor
    """Pages, int32."""
    kept: list[int]
    """Index of each in the sequence."""


def attention_of(cache: KvCache, sequences: Seq[Weighed], spans: Seq[Span], kv: KvPolicy) -> Attend:
    """Attention of one step; `spans` belong to `sequences`, single tokens first."""
    if kv.kind is KvPolicyKind.FULL:
        return StepAttend(cache, cache.step(spans))
    if kv.kind is KvPolicyKind.QUEST:
        return QuestAttend(cache, spans, kv)
    visibility = cache.shape.visibility
    if kv.window is not None:
        visibility = Visibility(kv.window, kv.sink_tokens)
    step = Step(spans, cache.page_size, visibility)
    return WeighingAttend(cache, step, sequences, kv) if kv.weighs else StepAttend(cache, step)


class QuestAttend:
    """Decoded tokens and the end of a prompt attend the pages that may matter most to them."""

    def __init__(self, cache: KvCache, spans: Seq[Span], kv: KvPolicy) -> None:
        """Split the step."""
        self._cache, self._kv, size = cache, kv, cache.page_size
        self._budget = kv.budget_pages(size)
        self._sinks, self._recent = kv.sink_pages(size), kv.recent_pages(size)
        self._step = cache.step(spans)
        self._selections: list[_Selection] = []
        begin = 0
        whole: list[Span] = []
        selecting: list[Span] = []
        whole_rows: list[int] = []
        chosen_rows: list[int] = []
        for span in spans:
            rows = range(begin, begin + span.end - span.start)
            begin = rows.stop
            first = span.start // size
            if len(rows) <= TAIL_TOKENS:
                pages = torch.tensor(span.pages[: (span.end - 1) // size + 1], dtype=torch.int32)
                local = slice(len(chosen_rows), len(chosen_rows) + len(rows))
                self._selections.append(
                    _Selection(pages[:first], pages[first:], span.start % size, local)
                )
                selecting.append(span)
                chosen_rows += rows
            else:
                whole.append(_windowed(span, kv, size))
                whole_rows += rows
        window = Visibility(kv.prefill_window, kv.sink_tokens) if kv.prefill_window else None
        self._whole = Step(whole, size, window or cache.shape.visibility) if whole else None
        self._chosen = cache.step(selecting) if selecting else None
        self._whole_T, self._chosen_T = torch.tensor(whole_rows), torch.tensor(chosen_rows)

    def __call__(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        """Attend in `layer`; returns [T, H, D]."""
        cache = self._cache
        cache.write(layer, self._step, k_TKD, v_TKD)
        if self._chosen is None:
            assert self._whole is not None
            return cache.attend(layer, q_THD, self._whole)
        if self._whole is None:
            return self._select(layer, q_THD, self._chosen)
        out_THD = torch.empty_like(q_THD, memory_format=torch.contiguous_format)
        chosen, whole = q_THD[self._chosen_T], q_THD[self._whole_T]
        out_THD[self._chosen_T] = self._select(layer, chosen, self._chosen)
        out_THD[self._whole_T] = cache.attend(layer, whole, self._whole)
        return out_THD

    def _select(self, layer: int, q_THD: Tensor, step: Step) -> Tensor:
        return self._cache.attend_chosen(
            layer, q_THD, step, [self._choice(layer, q_THD, each) for each in self._selections]
        )

    def _choice(self, layer: int, q_THD: Tensor, piece: _Selection) -> Choice:
        num_kv, size = self._cache.shape.config.num_kv_heads, self._cache.page_size
        past = piece.past_W
        num_chosen = max(self._budget - len(piece.own), self._sinks + self._recent)
        if len(past) <= num_chosen:
            pages_KN = past.expand(num_kv, -1)
        else:
            q_BHD = q_THD[piece.rows]
            bounds_BHW = self._cache.bound(layer, q_BHD, [past] * len(q_BHD))
            bounds_KW = bounds_BHW.view(len(q_BHD), num_kv, -1, len(past)).amax(dim=(0, 2))
            chosen_KN = choose_pages(bounds_KW, num_chosen, sinks=self._sinks, recent=self._recent)
            pages_KN = past[chosen_KN]
        both = torch.cat((pages_KN, piece.own.expand(num_kv, -1)), dim=1)
        return Choice(both, pages_KN.shape[1] * size + piece.start)


class WeighingAttend:
    """Attention over the pages that are left, and how much of it falls on each."""

    def __init__(self, cache: KvCache, step: Step, sequences: Seq[Weighed], kv: KvPolicy) -> None:
        """Find the tokens to observe."""
        self._cache, self._step, begin = cache, step, 0
        self._observed: list[_Observed] = []
        for sequence, span, view in zip(sequences, step.spans, step.views, strict=True):
            count = span.end - span.start
            first = _first_observed(kv, sequence, span)
            if first < span.end:
                rows = torch.arange(begin + first - span.start, begin + count)
                places = [view.start + p - span.start for p in range(first, span.end)]
                table = torch.tensor(view.pages, dtype=torch.int32)
                pages = span.pages[: (span.end - 1) // cache.page_size + 1]
                kept = [i for i, page in enumerate(pages) if page >= 0]
                self._observed.append(_Observed(sequence, rows, places, table, kept))
                missing = len(span.pages) - len(sequence.page_mass)
                sequence.page_mass.extend([0.0] * missing)
            begin += count

    def __call__(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        """Attend in `layer`; returns [T, H, D]."""
        self._cache.write(layer, self._step, k_TKD, v_TKD)
        for seen in self._observed:
            q_BHD = q_THD[seen.rows]
            mass_BHW = self._cache.mass(layer, q_BHD, [seen.table] * len(q_BHD), seen.places)
            added = mass_BHW.softmax(-1).sum(dim=(0, 1)).tolist()
            for i, mass in zip(seen.kept, added, strict=True):
                seen.sequence.page_mass[i] += mass
        return self._cache.attend(layer, q_THD, self._step)


def _first_observed(kv: KvPolicy, sequence: Weighed, span: Span) -> int:
    """Position from which tokens of `span` are observed."""
    if kv.kind is KvPolicyKind.H2O:
        return max(span.start, span.end - OBSERVED_TOKENS)
    if span.start >= sequence.num_prompt:
        return span.end
    return max(span.start, min(span.end, sequence.num_prompt - OBSERVED_TOKENS))


def _windowed(span: Span, kv: KvPolicy, size: int) -> Span:
    """The same tokens over sinks and window alone."""
    if not kv.prefill_window:
        return span
    low = max(0, span.start - kv.prefill_window + 1) // size
    sinks = min(kv.sink_pages(size), low)
    last = (span.end - 1) // size
    return span._replace(chosen=[*range(sinks), *range(low, last + 1)])
