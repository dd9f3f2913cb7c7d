"""Mastered items come back now and then: training only on what is hard unlearns what was easy.

MiMo-7B kept a tenth of its samples for solved problems after removing them made training unstable.
The pool is per domain; which group is a rehearsal follows from a counter, never from chance.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

MASTERED_RATE = 0.9
"""Pass rate of a group from which its item counts as mastered."""
FORGOTTEN_RATE = 0.5
"""A mastered item below this leaves the pool: it teaches again."""


class EasyPool:
    """Mastered items of one domain, rehearsed longest-unseen first."""

    def __init__(self, *, share: float = 0.1, capacity: int = 1024) -> None:
        """Empty.

        Args:
            share: part of the domain's groups that rehearse, below 1.
            capacity: items kept; the oldest give way.
        """
        assert 0.0 <= share < 1.0
        assert capacity >= 1
        self._share, self._capacity = share, capacity
        self._items: deque[int] = deque()
        self._due = 0.0

    def __len__(self) -> int:
        """Items that may be rehearsed now."""
        return len(self._items)

    def next(self) -> int | None:
        """The item to rehearse, or None if this group should bring something new.

        An item that was handed out is back after `judged`.
        """
        self._due = min(self._due + self._share, 1.0 + self._share)
        if self._due < 1.0 or not self._items:
            return None
        self._due -= 1.0
        return self._items.popleft()

    def judged(self, item: int, pass_rate: float, *, rehearsed: bool = False) -> None:
        """A group of `item` was scored."""
        bar = FORGOTTEN_RATE if rehearsed else MASTERED_RATE
        if pass_rate >= bar and item not in self._items:
            self._items.append(item)
            if len(self._items) > self._capacity:
                self._items.popleft()

    def state(self) -> dict[str, Any]:
        """All that `load` needs."""
        return {"items": list(self._items), "due": self._due}

    def load(self, state: Mapping[str, Any]) -> None:
        """Take over what `state` returned."""
        self._items = deque(int(i) for i in state["items"])
        self._due = float(state["due"])
