"""What grammars allow at each position of a step.

    begin(work) --> [cores to spare: a thread of their own, beside the forward] --> Pending.result()
                    [none: here, on all threads of the engine, after the forward]

Either way the library computes the masks of all sequences at once, without the interpreter's lock.

Shapes: V vocabulary.
"""

import os
from collections.abc import Callable
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from burnish.core.records import Failure
from burnish.core.vocabulary import FailureKind
from burnish.rollout.engine.batch import Work
from burnish.rollout.engine.grammar import GrammarLimitError, GrammarState, allowed_together
from burnish.rollout.engine.sequence import Sequence

if TYPE_CHECKING:
    from llguidance import LLExecutor


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

_DEAD_END = "no token of the model can follow it"
# A step of 256 sequences keeps no more busy: a mask takes a millisecond at worst.
_MOST_SPARE = 8

Masks = dict[Sequence, list[Mask]]
"""For each sequence under a grammar: after its last known token, and after each guess."""


class Allowed(NamedTuple):
    """What a step may sample."""

    masks: Masks
    """Of all but those that failed."""
    failures: dict[Sequence, Failure]
    """Texts that are too much for their grammar."""


Pending = Callable[[], Allowed]
"""Waits for the masks of a step."""


class MaskMaker:
    """Computes the masks of one engine's steps. Used by its thread only."""

    def __init__(self, num_spare: int | None = None) -> None:
        """Use `num_spare` cores beside the forward; None finds out how many there are."""
        self._num_spare = num_spare
        self._executor: LLExecutor | None = None
        self._thread: ThreadPoolExecutor | None = None

    def begin(self, work: Seq[Work]) -> Pending:
        """Masks for the pieces that end in a sample; call the answer once, after the forward.

        Until then nobody may touch the grammars of these sequences.
        """
        held = [
            (piece.sequence, piece.sequence.grammar, piece.draft.tokens)
            for piece in work
            if piece.sequence.grammar is not None and piece.num_known == piece.sequence.num_pending
        ]
        if not held:
            return _nothing
        executor = self._open()
        if self._thread is None:
            return lambda: _allowed(held, executor)
        return self._thread.submit(_allowed, held, executor).result

    def close(self) -> None:
        """End its threads."""
        if self._thread is not None:
            self._thread.shutdown()
        self._thread = self._executor = None

    def _open(self) -> "LLExecutor":
        if self._executor is None:
            from llguidance import LLExecutor

            threads, spare = torch.get_num_threads(), self._num_spare
            if spare is None:
                spare = min(len(os.sched_getaffinity(0)) - threads, _MOST_SPARE)
            if spare > 0:
                self._thread = ThreadPoolExecutor(1, "burnish-masks")
            self._executor = LLExecutor(num_threads=spare if spare > 0 else threads)
        return self._executor


def limit_failure(error: GrammarLimitError) -> Failure:
    """A text is too much for its grammar: the failure of that request."""
    return Failure(
        kind=FailureKind.POLICY,
        where="rollout.engine",
        message=f"the grammar gave up on this text: {error}",
    )


def _nothing() -> Allowed:
    return Allowed({}, {})


def _allowed(held: Seq[tuple[Sequence, GrammarState, Seq[int]]], executor: "LLExecutor") -> Allowed:
    """Those without guesses all at once, the others one after the other."""
    masks: Masks = {}
    failures: dict[Sequence, Failure] = {}
    plain = [(sequence, state) for sequence, state, guesses in held if not guesses]
    found = allowed_together([state for _, state in plain], executor)
    for (sequence, _), bits in zip(plain, found, strict=True):
        if isinstance(bits, GrammarLimitError):
            failures[sequence] = limit_failure(bits)
        elif not bits.any():
            failures[sequence] = limit_failure(GrammarLimitError(_DEAD_END))
        else:
            masks[sequence] = [Mask(bits)]
    for sequence, state, guesses in held:
        if guesses:
            try:
                masks[sequence] = _walk(state, guesses)
            except GrammarLimitError as error:
                failures[sequence] = limit_failure(error)
    return Allowed(masks, failures)


def _walk(state: GrammarState, guesses: Seq[int]) -> list[Mask]:
    """Masks along a draft that the grammar takes; the state is as before."""
    bits = state.allowed_bits()
    if not bits.any():
        raise GrammarLimitError(_DEAD_END)
    found = [Mask(bits)]
    for guess in guesses:
        state.advance(guess)
        found.append(Mask(state.allowed_bits()))
    state.retreat(len(guesses))
    return found
