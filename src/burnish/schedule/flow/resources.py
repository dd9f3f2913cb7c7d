"""What tasks of a domain use, as a vector, and fairness by the resource that each uses most.

Dominant-resource fairness (Ghodsi et al. 2011): a domain's share is its greatest share of any
resource; the one with the least, over its weight, goes next. No domain would rather have another's
lot, none gains by claiming to need more, and nothing is left that somebody could use.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

# Per observed group: remembers about 33, as the domains' rates do.
_DECAY = 0.97


class Resources(NamedTuple):
    """Amounts of each resource."""

    decode_s: float = 0.0
    """Seconds of decode slots."""
    prefill_tokens: float = 0.0
    """Prompt tokens computed."""
    sandbox_s: float = 0.0
    """Seconds of sandbox CPUs."""
    judge_tokens: float = 0.0
    """Tokens of a judge model."""
    train_tokens: float = 0.0
    """Tokens through the trainer."""

    def plus(self, other: Resources) -> Resources:
        """Sum."""
        return Resources(*(a + b for a, b in zip(self, other, strict=True)))

    def times(self, factor: float) -> Resources:
        """Multiple."""
        return Resources(*(a * factor for a in self))

    def shares_of(self, capacity: Resources) -> tuple[float, ...]:
        """Part of each resource; what there is none of counts only if it is asked for."""
        return tuple(
            a / c if c > 0.0 else (0.0 if a == 0.0 else float("inf"))
            for a, c in zip(self, capacity, strict=True)
        )


class Profiles:
    """Mean resources of a group, by domain; the mean of all for one that was never seen."""

    def __init__(self) -> None:
        """Nothing was seen."""
        self._sums: dict[str, tuple[float, Resources]] = {}

    def observe(self, domain: str, used: Resources) -> None:
        """A group of `domain` is complete and used so much."""
        count, total = self._sums.get(domain, (0.0, Resources()))
        self._sums[domain] = (count * _DECAY + 1.0, total.times(_DECAY).plus(used))

    def expect(self, domain: str) -> Resources:
        """What the next group will use."""
        if domain in self._sums:
            count, total = self._sums[domain]
            return total.times(1.0 / count)
        means = [total.times(1.0 / count) for count, total in self._sums.values()]
        total = Resources()
        for mean in means:
            total = total.plus(mean)
        return total.times(1.0 / len(means)) if means else total

    def state(self) -> dict[str, Any]:
        """All that `load` needs."""
        return {d: [count, *total] for d, (count, total) in self._sums.items()}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`."""
        self._sums = {d: (row[0], Resources(*row[1:])) for d, row in state.items()}


class DominantShares:
    """Running accounts of who holds or used how much; progressive filling picks the poorest."""

    def __init__(self, capacity: Resources) -> None:
        """Nobody holds anything."""
        self._capacity = capacity
        self._held: dict[str, Resources] = {}

    def held(self, domain: str) -> Resources:
        """What a domain holds."""
        return self._held.get(domain, Resources())

    def share(self, domain: str) -> float:
        """Its dominant share."""
        return max(self.held(domain).shares_of(self._capacity))

    def take(self, domain: str, amount: Resources) -> None:
        """A group starts: charged with what it is expected to use, before it is measured."""
        self._held[domain] = self.held(domain).plus(amount)

    def give_back(self, domain: str, amount: Resources) -> None:
        """A group ended, or was cancelled."""
        left = self.held(domain).plus(amount.times(-1.0))
        self._held[domain] = Resources(*(max(v, 0.0) for v in left))

    def decay(self, factor: float) -> None:
        """Old use fades: for accounts of use rather than of holdings."""
        self._held = {d: r.times(factor) for d, r in self._held.items()}

    def fits(self, amount: Resources) -> bool:
        """Whether all of it is free."""
        total = amount
        for held in self._held.values():
            total = total.plus(held)
        return max(total.shares_of(self._capacity)) <= 1.0 + 1e-9

    def poorest(self, eligible: Collection[str], weights: Mapping[str, float]) -> str:
        """Who goes next; the first of equals in the order of `eligible`."""
        return min(eligible, key=lambda d: self.share(d) / weights.get(d, 1.0))
