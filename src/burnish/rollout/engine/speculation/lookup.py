"""Guesses from the text itself: what followed the same tokens last time (Saxena 2023).

Each n-gram of prompt and output is noted once, in a table from its tokens to where it ended last:
O(1) per token and per guess.
"""

from collections.abc import Sequence as Seq
from weakref import WeakKeyDictionary

from burnish.core.vocabulary import NoDraft
from burnish.rollout.engine.sequence import Sequence
from burnish.rollout.engine.speculation.drafter import Ask, Draft, Target

# Longer ones first: they are right more often. After a changed word two tokens must agree again.
SIZES = (4, 2)


class NgramIndex:
    """Where each n-gram of a growing text ended last, before its present end."""

    def __init__(self, sizes: Seq[int] = SIZES) -> None:
        """Of an empty text."""
        assert all(size > 0 for size in sizes)
        self._tables: list[tuple[int, dict[tuple[int, ...], int]]] = [
            (size, {}) for size in sorted(sizes, reverse=True)
        ]
        self._num_tokens = 0
        self._source: int | None = None

    def catch_up(self, tokens: Seq[int]) -> None:
        """Note what was added to the text."""
        for end in range(self._num_tokens + 1, len(tokens) + 1):
            source = self._source
            # A match that goes on is kept: it is longer than any n-gram here.
            goes_on = source is not None and tokens[source] == tokens[end - 1]
            self._source = source + 1 if goes_on and source is not None else None
            for size, table in self._tables:
                if end < size:
                    continue
                key = tuple(tokens[end - size : end])
                if self._source is None:
                    self._source = table.get(key)
                table[key] = end
        self._num_tokens = len(tokens)

    def guess(self, tokens: Seq[int], most: int) -> tuple[int, ...]:
        """What may follow, up to `most` tokens. The text must be the one that was noted."""
        assert len(tokens) == self._num_tokens
        if self._source is None:
            return ()
        found = list(tokens[self._source : self._source + most])
        # A source that reaches the end of the text is a loop: it goes on with the guess itself.
        period = len(tokens) - self._source
        while len(found) < most:
            found.append(found[len(found) - period])
        return tuple(found)


class LookupDrafter:
    """Guesses by `NgramIndex`."""

    relative_cost = 0.0
    no_limit = NoDraft.NO_MATCH

    def __init__(self) -> None:
        """Knows no text."""
        self._indices: WeakKeyDictionary[Sequence, NgramIndex] = WeakKeyDictionary()

    def unable(self, version: int) -> NoDraft | None:
        """Always able: it has no weights."""
        return None

    def limit(self, sequence: Sequence, most: int) -> int:
        """All or nothing: a text that repeats itself can be continued for ever."""
        return most if self._index(sequence).guess(sequence.tokens, 1) else 0

    def draft(self, asks: Seq[Ask], target: Target) -> list[Draft]:
        """Look it up."""
        return [Draft(self._index(s).guess(s.tokens, most)) for s, most in asks]

    def checked(self, sequence: Sequence, num_accepted: int) -> None:
        """The text says it all."""

    def release(self) -> None:
        """Indices die with their sequences."""

    def _index(self, sequence: Sequence) -> NgramIndex:
        index = self._indices.get(sequence)
        if index is None:
            index = self._indices[sequence] = NgramIndex()
        index.catch_up(sequence.tokens)
        return index
