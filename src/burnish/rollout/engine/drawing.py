"""What a step decides: the next token of each sequence, or several where guesses were right.

Each row of logits is one position of one sequence: the last known token, then each guess. All rows
are drawn at once, each with the numbers of its own position; a guess counts where the target draws
the same, so tokens are those of one forward per token.

Shapes: T tokens of the step, R rows drawn, G of them under a grammar, E hidden width, V vocabulary.
"""

from collections.abc import Sequence as Seq
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from burnish.core.records import Failure
from burnish.core.vocabulary import FailureKind
from burnish.rollout.engine.batch import Work
from burnish.rollout.engine.masks import Mask, Masks
from burnish.rollout.engine.sampler import (
    Draw,
    Sampled,
    divisor,
    log_totals,
    probabilities,
    sample,
    uniform,
)
from burnish.rollout.engine.sequence import Sequence, Token
from burnish.rollout.engine.speculation.rejection import acceptance, invert, residual
from burnish.rollout.engine.weights import ServedModel

NOT_FINITE = Failure(
    kind=FailureKind.INFRA,
    where="rollout.engine",
    message="the logits of this request are not finite: weights or cache are broken",
)
# Changes a request's key to the stream that decides on drafts with chances.
_ACCEPT_STREAM = 0x2545F4914F6CDD1D


class Decision(NamedTuple):
    """What one sequence gets."""

    tokens: list[Token]
    """Accepted guesses, then one token of the target's own."""
    failure: Failure | None = None
    """What went wrong after them."""


def decide(
    model: ServedModel, hidden_TE: Tensor, work: Seq[Work], chosen: Seq[int], masks: Masks
) -> list[Decision]:
    """Draw for the pieces of work `chosen`, whose sequences are known to their last token."""
    pieces = [work[i] for i in chosen]
    rows = _Rows(pieces, masks)
    logits_RV = model.logits(_rows_of(hidden_TE, work, chosen))
    total_G = rows.totals(logits_RV)
    rows.hold(logits_RV)
    sampled = sample(logits_RV, rows.draws)
    decisions, first = [], 0
    for piece in pieces:
        decisions.append(_verify(piece, first, logits_RV, rows.draws, sampled))
        first += 1 + len(piece.draft.tokens)
    if rows.held:
        _add_unmasked(decisions, pieces, rows, total_G, logits_RV)
    return decisions


def draw_of(sequence: Sequence, depth: int = 0) -> Draw:
    """How the token that follows the known ones and `depth` guesses is drawn."""
    params = sequence.request.params
    return Draw(
        params.temperature,
        params.top_p,
        uniform(sequence.seed_key, len(sequence.tokens) + depth),
        params.top_k,
        params.min_p,
        params.num_top_logprobs,
    )


class _Rows:
    """Which rows are drawn, and what each may be."""

    def __init__(self, pieces: Seq[Work], masks: Masks) -> None:
        self.draws: list[Draw] = []
        self.held: list[int] = []
        """Rows under a grammar."""
        self._stops: list[tuple[int, Sequence]] = []
        self._masks: list[Mask] = []
        for sequence, _, draft in pieces:
            allowed = masks.get(sequence)
            for depth in range(1 + len(draft.tokens)):
                row = len(self.draws)
                self.draws.append(draw_of(sequence, depth))
                if allowed is not None:
                    self.held.append(row)
                    self._masks.append(allowed[depth])
                if sequence.stops and not sequence.may_stop_at(depth):
                    self._stops.append((row, sequence))

    def totals(self, logits_RV: Tensor) -> list[float]:
        """Logarithms of the sums over all tokens of the rows under a grammar, before any mask."""
        if not self.held:
            return []
        whole = len(self.held) == len(logits_RV)
        part_GV = logits_RV if whole else logits_RV[torch.tensor(self.held)]
        return log_totals(part_GV, [self.draws[row] for row in self.held])

    def hold(self, logits_RV: Tensor) -> None:
        """Make impossible what is not allowed, in place."""
        touched = sorted({*self.held, *(row for row, _ in self._stops)})
        if not touched:
            return
        if logits_RV.device.type == "cpu":
            # Numpy on one thread: torch would wake its others for every row.
            self._hold(logits_RV.numpy(), {row: row for row in touched})
            return
        index_M = torch.tensor(touched)
        part_MV = logits_RV.index_select(0, index_M).cpu()
        self._hold(part_MV.numpy(), {row: i for i, row in enumerate(touched)})
        logits_RV.index_copy_(0, index_M, part_MV.to(logits_RV.device))

    def _hold(self, logits_MV: NDArray[np.float32], place: dict[int, int]) -> None:
        """`place` says where each row is."""
        for row, allowed in zip(self.held, self._masks, strict=True):
            allowed.apply(logits_MV[place[row]])
        allowed_of = dict(zip(self.held, self._masks, strict=True))
        for row, sequence in self._stops:
            stops = list(sequence.stops)
            mask = allowed_of.get(row)
            # Where a text can only end, it ends, however short.
            if mask is None or mask.allows_beside(stops):
                logits_MV[place[row], stops] = -np.inf


def _rows_of(hidden_TE: Tensor, work: Seq[Work], chosen: Seq[int]) -> Tensor:
    """Hidden states [R, E] of the last known token of each piece and of its guesses."""
    ends = list(accumulate(w.num_tokens for w in work))
    index = [row for i in chosen for row in range(ends[i] - 1 - len(work[i].draft.tokens), ends[i])]
    return hidden_TE if len(index) == len(hidden_TE) else hidden_TE[torch.tensor(index)]


def _verify(
    piece: Work, first: int, logits_RV: Tensor, draws: Seq[Draw], sampled: Sampled
) -> Decision:
    """Take guesses while they are right, and the first token that is not a guess."""
    decided: list[Token] = []
    guesses, chances = piece.draft
    for depth in range(1 + len(guesses)):
        row = first + depth
        if row in sampled.broken:
            return Decision(decided, NOT_FINITE)
        token, logprob = sampled.tokens[row], sampled.logprobs[row]
        is_guess = depth < len(guesses) and token == guesses[depth]
        if chances is not None and depth < len(guesses):
            p_V = probabilities(logits_RV[row], draws[row])
            token, is_guess = _judge(piece.sequence, depth, guesses[depth], p_V, chances[depth])
            logprob = float(p_V[token].log())
        decided.append(Token(token, logprob, sampled.tops[row]))
        if not is_guess:
            break
    return Decision(decided)


def _judge(
    sequence: Sequence, depth: int, guess: int, p_V: Tensor, q_V: Tensor
) -> tuple[int, bool]:
    """Keep a guess that was drawn from q, or draw what the target has beyond q."""
    position = len(sequence.tokens) + depth
    if uniform(sequence.seed_key ^ _ACCEPT_STREAM, position) < acceptance(p_V, q_V, guess):
        return guess, True
    return invert(residual(p_V, q_V), uniform(sequence.seed_key, position)), False


def _add_unmasked(
    decisions: list[Decision],
    pieces: Seq[Work],
    rows: _Rows,
    total_G: Seq[float],
    logits_RV: Tensor,
) -> None:
    """Log-probs of what was decided before any mask: what is allowed has kept its logit."""
    totals = dict(zip(rows.held, total_G, strict=True))
    first = 0
    for piece, decision in zip(pieces, decisions, strict=True):
        for depth, token in enumerate(decision.tokens):
            row = first + depth
            if row in totals:
                scaled = float(logits_RV[row, token.id]) / divisor(rows.draws[row].temperature)
                decision.tokens[depth] = token._replace(unmasked=scaled - totals[row])
        first += 1 + len(piece.draft.tokens)
