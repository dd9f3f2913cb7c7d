"""What groups use, as a vector, and their cost by the resource that they use most of.

Dominant-resource fairness (Ghodsi et al. 2011): a domain's use is its greatest part of any
resource, and those are what is made equal (over their weights). The dealer's deficits do that once
the cost of a group is its dominant part: no domain would rather have another's lot, and none gains
by claiming to need more. One that fills the boxes and one that fills the engine then run side by
side, where equal seconds would let the second wait for the first.
"""

from __future__ import annotations

from typing import NamedTuple

# Per trained batch: remembers about ten, so that a slow first one is soon forgotten.
_KEEP = 0.9


class Resources(NamedTuple):
    """Amounts of each resource."""

    engine_s: float = 0.0
    """Seconds of the engine's slots, prompts included."""
    box_s: float = 0.0
    """Seconds of boxes."""
    train_s: float = 0.0
    """Seconds of the trainer."""

    def dominant(self, capacity: Resources) -> float:
        """Greatest part of a resource; what there is none of does not count."""
        return max(a / c if c > 0.0 else 0.0 for a, c in zip(self, capacity, strict=True))


class GroupCosts:
    """Seconds for which a group fills the resource that it uses most of."""

    def __init__(self, num_slots: int, num_boxes: int) -> None:
        """Of an engine and a pool of that size, and one trainer of unknown speed."""
        self._capacity = Resources(float(num_slots), float(num_boxes), 1.0)
        self._tokens = self._seconds = 0.0

    def trained(self, num_tokens: int, seconds: float) -> None:
        """A batch took the trainer so long."""
        self._tokens = self._tokens * _KEEP + num_tokens
        self._seconds = self._seconds * _KEEP + seconds

    def cost(self, *, episodes_s: float, box_s: float, num_tokens: float) -> float:
        """Of a judged group.

        Args:
            episodes_s: how long its episodes lasted, added up.
            box_s: of that, how long they held boxes.
            num_tokens: what the trainer will compute for it.
        """
        train_s = num_tokens * self._seconds / self._tokens if self._tokens else 0.0
        used = Resources(max(episodes_s - box_s, 0.0), box_s, train_s)
        return used.dominant(self._capacity)
