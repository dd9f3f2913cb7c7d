"""Guesses from a model: one token after the other, for all sequences together.

Shapes: T tokens, N sequences, V vocabulary.
"""

from collections.abc import Sequence as Seq
from itertools import accumulate

import torch
from torch import Tensor

from burnish.core.vocabulary import DraftSampling, NoDraft
from burnish.rollout.engine.cache.step import Span
from burnish.rollout.engine.cache.storage import StepAttend
from burnish.rollout.engine.drawing import draw_of
from burnish.rollout.engine.sampler import Draw, probabilities, sample, uniform
from burnish.rollout.engine.sequence import Sequence
from burnish.rollout.engine.speculation.bodies import Body
from burnish.rollout.engine.speculation.drafter import Ask, Draft, Target

# The drafting model reads a prompt in pieces like the target does, so that one long prompt does
# not make a step of a whole batch long.
_MOST_READ = 512
# Changes a request's key to that of a stream of its own.
_DRAFT_STREAM = 0x5DEECE66D1CE4E5B


class ModelDrafter:
    """Draws from `body` as the request would draw from the target."""

    no_limit = NoDraft.CONTEXT

    def __init__(self, body: Body, sampling: DraftSampling) -> None:
        """Draw with the request's numbers, or (rejection) with others."""
        self.body, self._sampling = body, sampling
        self._lengths: dict[Sequence, int] = {}
        self._target: Target | None = None

    @property
    def relative_cost(self) -> float:
        """That of the body."""
        return self.body.relative_cost

    def unable(self, version: int) -> NoDraft | None:
        """Whether the body's weights are too old."""
        return self.body.unable(version)

    def limit(self, sequence: Sequence, most: int) -> int:
        """Up to the end of the drafting model's own context."""
        return max(0, min(most, self.body.context - len(sequence.tokens)))

    def draft(self, asks: Seq[Ask], target: Target) -> list[Draft]:
        """Read what is new, then draw level by level; empty where reading takes longer."""
        self._target = target
        counts = [
            len(ask.sequence.tokens) - self.body.num_known(ask.sequence, target.pool)
            for ask in asks
        ]
        found: list[tuple[list[int], list[Tensor]]] = [([], []) for _ in asks]
        budget = _MOST_READ
        reading: list[tuple[int, int]] = []
        for i in sorted(range(len(asks)), key=lambda i: counts[i]):
            take = min(counts[i], max(1, budget)) if counts[i] > 1 else counts[i]
            budget -= take
            reading.append((i, take))
        rows_NE = self._read(asks, counts, reading, target)
        ready = [i for i, take in reading if take == counts[i]]
        logits_NV = self.body.logits(rows_NE, target)
        for level in range(max((asks[i].num_tokens for i in ready), default=0)):
            # Whose logits were no numbers has fewer tokens, and gets no more.
            active = [i for i in ready if asks[i].num_tokens > level == len(found[i][0])]
            if not active:
                break
            if level:
                logits_NV = self._next(asks, active, found, target)
            self._draw(logits_NV, asks, active, found)
        self._lengths = {asks[i].sequence: len(found[i][0]) for i in ready}
        for sequence in self._lengths:
            self._note(sequence, len(sequence.tokens))
        is_certain = self._sampling is DraftSampling.COUPLED
        return [
            Draft(
                tuple(tokens),
                None if is_certain or s.request.params.temperature == 0.0 else chances,
            )
            for (s, _), (tokens, chances) in zip(asks, found, strict=True)
        ]

    def checked(self, sequence: Sequence, num_accepted: int) -> None:
        """What was accepted has been read, but for the last token drafted."""
        num_read = min(num_accepted, self._lengths.pop(sequence, 0) - 1)
        if num_read > 0:
            # The sequence has grown by what was accepted and one more.
            self._note(sequence, len(sequence.tokens) - 1 - num_accepted + num_read)

    def release(self) -> None:
        """Give the body's memory back."""
        self._target, self._lengths = None, {}
        self.body.release()

    def _note(self, sequence: Sequence, num_tokens: int) -> None:
        assert self._target is not None
        self.body.learned(sequence, num_tokens, self._target.pool)

    def _read(
        self, asks: Seq[Ask], counts: Seq[int], reading: Seq[tuple[int, int]], target: Target
    ) -> Tensor:
        """Hidden states of the last token of those whose text is read to its end."""
        spans, ids = [], []
        for i, take in reading:
            sequence = asks[i].sequence
            start = len(sequence.tokens) - counts[i]
            spans.append(Span(sequence.pages, start, start + take))
            ids += sequence.tokens[start : start + take]
        hidden_TE = self._forward(spans, ids, target)
        for (i, take), span in zip(reading, spans, strict=True):
            if take < counts[i]:
                self._note(asks[i].sequence, span.end)
        ends = accumulate(take for _, take in reading)
        last = [end - 1 for (i, take), end in zip(reading, ends, strict=True) if take == counts[i]]
        return hidden_TE[torch.tensor(last, dtype=torch.int64)]

    def _next(
        self,
        asks: Seq[Ask],
        active: Seq[int],
        found: Seq[tuple[list[int], list[Tensor]]],
        target: Target,
    ) -> Tensor:
        """Logits after the token that each has drawn last."""
        spans, ids = [], []
        for i in active:
            tokens = found[i][0]
            end = len(asks[i].sequence.tokens) + len(tokens)
            spans.append(Span(asks[i].sequence.pages, end - 1, end))
            ids.append(tokens[-1])
        return self.body.logits(self._forward(spans, ids, target), target)

    def _forward(self, spans: list[Span], ids: list[int], target: Target) -> Tensor:
        positions_T = torch.tensor([p for span in spans for p in range(span.start, span.end)])
        cache = self.body.cache(target)
        attend = StepAttend(cache, cache.step(spans))
        return self.body.hidden(torch.tensor(ids), positions_T, attend, target)

    def _draw(
        self,
        logits_NV: Tensor,
        asks: Seq[Ask],
        active: Seq[int],
        found: Seq[tuple[list[int], list[Tensor]]],
    ) -> None:
        draws = [self._how(asks[i].sequence, len(found[i][0])) for i in active]
        sampled = sample(logits_NV, draws)
        for row, i in enumerate(active):
            if row in sampled.broken:
                continue
            found[i][0].append(sampled.tokens[row])
            if self._sampling is DraftSampling.REJECTION and draws[row].temperature > 0.0:
                found[i][1].append(probabilities(logits_NV[row], draws[row]))

    def _how(self, sequence: Sequence, depth: int) -> Draw:
        draw = draw_of(sequence, depth)._replace(num_top=0)
        if self._sampling is DraftSampling.COUPLED:
            return draw
        position = len(sequence.tokens) + depth
        return draw._replace(uniform=uniform(sequence.seed_key ^ _DRAFT_STREAM, position))
