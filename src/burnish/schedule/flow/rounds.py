"""Long-tail rounds: what is expected to be long runs together, instead of one in every batch.

A batch is done when its longest episode is. If one group in ten takes ten times as long, almost
every batch waits for one; collected into rounds of their own they cost one wait in ten batches
(tail batching: RollPacker, NSDI 2026). Nothing is dropped and nothing is overtaken for ever: a
round begins when a batch of long groups waits, or the oldest has waited for `max_wait` batches.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple


class Deferred(NamedTuple):
    """A pick that waits for its round."""

    group_id: str
    """Which."""
    since: int
    """Batch number at which it was put off."""


class LongTail:
    """Puts long picks off; pure, counts batches instead of time."""

    def __init__(self, round_size: int, max_wait: int = 4, ratio: float = 3.0) -> None:
        """Start empty.

        Args:
            round_size: groups that make a round.
            max_wait: batches after which one begins whatever its size.
            ratio: an expected length of so many times the usual one is long.
        """
        assert round_size >= 1
        assert max_wait >= 1
        self._round_size, self._max_wait, self._ratio = round_size, max_wait, ratio
        self._waiting: deque[Deferred] = deque()

    def __len__(self) -> int:
        """Picks that wait."""
        return len(self._waiting)

    def defers(self, group_id: str, predicted: float, usual: float, batch: int) -> bool:
        """Whether to put this pick off; True keeps it here until a round gives it back."""
        if usual <= 0.0 or predicted < self._ratio * usual:
            return False
        self._waiting.append(Deferred(group_id, batch))
        return True

    def round(self, batch: int) -> tuple[str, ...]:
        """The picks of a round that begins now; empty if none does."""
        full = len(self._waiting) >= self._round_size
        late = bool(self._waiting) and batch - self._waiting[0].since >= self._max_wait
        if not full and not late:
            return ()
        count = min(self._round_size, len(self._waiting))
        return tuple(self._waiting.popleft().group_id for _ in range(count))

    def state(self) -> list[list[object]]:
        """All that `load` needs."""
        return [[d.group_id, d.since] for d in self._waiting]

    def load(self, state: list[list[object]]) -> None:
        """Go on from `state`."""
        self._waiting = deque(Deferred(str(g), int(str(s))) for g, s in state)
