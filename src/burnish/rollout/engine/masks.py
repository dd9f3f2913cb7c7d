"""What grammars allow at each position of a step, computed while the forward runs.

Shapes: V vocabulary.
"""

from collections.abc import Sequence as Seq
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from burnish.core.records import Failure
from burnish.core.vocabulary import FailureKind
from burnish.rollout.engine.batch import Work
from burnish.rollout.engine.grammar import GrammarLimitError, GrammarState
from burnish.rollout.engine.sequence import Sequence

Mask = np.ndarray[Any, np.dtype[np.bool_]]
"""[V]: what may come next."""
Masks = dict[Sequence, list[Mask]]
"""For each sequence under a grammar: after its last known token, and after each guess."""


class Allowed(NamedTuple):
    """What a step may sample."""

    masks: Masks
    """Of all but those that failed."""
    failures: dict[Sequence, Failure]
    """Texts that are too much for their grammar."""


_NOTHING = Allowed({}, {})


class MaskMaker:
    """One thread beside the forward; it is started with the first grammar."""

    def __init__(self) -> None:
        """No thread yet."""
        self._thread: ThreadPoolExecutor | None = None

    def begin(self, work: Seq[Work]) -> "Future[Allowed] | None":
        """Start on the pieces that end in a sample; None if no grammar is among them."""
        held = [
            w
            for w in work
            if w.sequence.grammar is not None and w.num_known == w.sequence.num_pending
        ]
        if not held:
            return None
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="burnish-grammar")
        return self._thread.submit(_make, held)


def finished(future: "Future[Allowed] | None") -> Allowed:
    """Wait for `begin`."""
    return _NOTHING if future is None else future.result()


def limit_failure(error: GrammarLimitError) -> Failure:
    """A text is too much for its grammar: the failure of that request."""
    return Failure(
        kind=FailureKind.POLICY,
        where="rollout.engine",
        message=f"the grammar gave up on this text: {error}",
    )


def _make(held: Seq[Work]) -> Allowed:
    masks: Masks = {}
    failures: dict[Sequence, Failure] = {}
    for sequence, _, draft in held:
        assert sequence.grammar is not None
        try:
            masks[sequence] = _walk(sequence.grammar, draft.tokens)
        except GrammarLimitError as error:
            failures[sequence] = limit_failure(error)
    return Allowed(masks, failures)


def _walk(state: GrammarState, guesses: Seq[int]) -> list[Mask]:
    """Masks along a draft that the grammar takes; the state is as before."""
    found = [state.allowed().numpy()]
    for guess in guesses:
        state.advance(guess)
        found.append(state.allowed().numpy())
    state.retreat(len(guesses))
    return found
