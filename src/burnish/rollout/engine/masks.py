"""What grammars allow at each position of a step.

Made on the engine's own thread: one beside the forward, with no core to spare, gained nothing in
interleaved runs at batch 1 and 64.

Shapes: V vocabulary.
"""

from collections.abc import Sequence as Seq
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from burnish.core.records import Failure
from burnish.core.vocabulary import FailureKind
from burnish.rollout.engine.batch import Work
from burnish.rollout.engine.grammar import GrammarLimitError, GrammarState
from burnish.rollout.engine.sequence import Sequence


class Mask:
    """What may come next, as bits: eight tokens at once are looked up in a table of 256."""

    def __init__(self, bits: NDArray[np.uint8]) -> None:
        """Bits [V / 8] or more, the first token lowest; kept."""
        self._bits = bits

    def apply(self, logits_V: NDArray[np.float32]) -> None:
        """Make impossible what is not allowed, in place."""
        penalty = np.take(_PENALTY, self._bits, axis=0).reshape(-1)
        logits_V += penalty[: len(logits_V)]

    def allows_beside(self, tokens: Seq[int]) -> bool:
        """Whether anything but `tokens` may come."""
        bits = self._bits.copy()
        for token in tokens:
            bits[token >> 3] &= ~(1 << (token & 7)) & 0xFF
        return bool(bits.any())


# For each byte of bits, what is added to its eight logits.
_PENALTY = np.where(
    np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little") == 1,
    np.float32(0),
    np.float32(-np.inf),
)

Masks = dict[Sequence, list[Mask]]
"""For each sequence under a grammar: after its last known token, and after each guess."""


class Allowed(NamedTuple):
    """What a step may sample."""

    masks: Masks
    """Of all but those that failed."""
    failures: dict[Sequence, Failure]
    """Texts that are too much for their grammar."""


def allowed_by(work: Seq[Work]) -> Allowed:
    """Masks for the pieces that end in a sample."""
    masks: Masks = {}
    failures: dict[Sequence, Failure] = {}
    for piece in work:
        sequence = piece.sequence
        if sequence.grammar is None or piece.num_known != sequence.num_pending:
            continue
        try:
            masks[sequence] = _walk(sequence.grammar, piece.draft.tokens)
        except GrammarLimitError as error:
            failures[sequence] = limit_failure(error)
    return Allowed(masks, failures)


def limit_failure(error: GrammarLimitError) -> Failure:
    """A text is too much for its grammar: the failure of that request."""
    return Failure(
        kind=FailureKind.POLICY,
        where="rollout.engine",
        message=f"the grammar gave up on this text: {error}",
    )


def _walk(state: GrammarState, guesses: Seq[int]) -> list[Mask]:
    """Masks along a draft that the grammar takes; the state is as before."""
    bits = state.allowed_bits()
    if not bits.any():
        raise GrammarLimitError("no token of the model can follow it")
    found = [Mask(bits)]
    for guess in guesses:
        state.advance(guess)
        found.append(Mask(state.allowed_bits()))
    state.retreat(len(guesses))
    return found
