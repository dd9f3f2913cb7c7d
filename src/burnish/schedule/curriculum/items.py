"""Items of one domain in order, each handed out once; by tier where there are tiers.

Items lie in the pool in one sequence whatever their tier. Looking for one of a certain tier passes
others, which are kept until their tier's turn comes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

# Items looked at in one search: each costs a call into the environment.
_LOOK_AHEAD = 64
# Passed items kept per tier; beyond that the newest are skipped for good. A tier that is never
# drawn would otherwise make the checkpoint grow for ever.
_MOST_KEPT = 1024


class Items:
    """A cursor over the pool."""

    def __init__(self, first: int, num_tiers: int, tier_of: Callable[[int], int]) -> None:
        """Start at item `first`."""
        self._next, self._tier_of = first, tier_of
        self._kept: list[deque[int]] = [deque() for _ in range(num_tiers)]

    def take(self, tier: int) -> tuple[int, int]:
        """An unused item of `tier`, or the nearest there is after a long search; and its tier.

        Raises:
            ValueError: the environment names a tier that it does not have.
        """
        if self._kept[tier]:
            return self._kept[tier].popleft(), tier
        if len(self._kept) == 1:
            self._next += 1
            return self._next - 1, 0
        for _ in range(_LOOK_AHEAD):
            item, self._next = self._next, self._next + 1
            found = self._tier_of(item)
            if not 0 <= found < len(self._kept):
                raise ValueError(f"item {item} is of tier {found} of {len(self._kept)}")
            if found == tier:
                return item, found
            if len(self._kept[found]) < _MOST_KEPT:
                self._kept[found].append(item)
        # The environment has next to none of these: the nearest easier one, else a harder one.
        others = [*range(tier - 1, -1, -1), *range(tier + 1, len(self._kept))]
        nearest = next(other for other in others if self._kept[other])
        return self._kept[nearest].popleft(), nearest

    def state(self) -> dict[str, Any]:
        """All that `load` needs."""
        return {"next": self._next, "kept": [list(kept) for kept in self._kept]}

    def load(self, state: Mapping[str, Any]) -> None:
        """Take over what `state` returned."""
        self._next = int(state["next"])
        self._kept = [deque(int(i) for i in kept) for kept in state["kept"]]
