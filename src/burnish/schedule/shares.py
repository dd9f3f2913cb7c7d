"""Shares of a budget: projection into bounds, and deficit counters that realise them in cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def bounded_shares(
    values: Sequence[float], low: Sequence[float], high: Sequence[float]
) -> list[float]:
    """Shares proportional to `values` within [low, high], summing to 1 (water filling).

    Bounds that cannot be met together give way: minima that sum to more than 1 are scaled down,
    and maxima that sum to less than 1 are lifted in proportion (this happens when quarantine
    leaves few domains).
    """
    assert values
    assert len(values) == len(low) == len(high)
    low = _scaled(low, at_most=1.0)
    high = [max(h, lo) for h, lo in zip(_lifted(high), low, strict=True)]
    # share(scale) = clip(value * scale) grows with scale, so bisection finds the one that sums
    # to 1. The exponent doubles first: the right scale may be anywhere in the float range.
    weights = [max(v, 1e-300) for v in values]
    top = max(weights)
    weights = [max(w / top, 1e-12) for w in weights]
    lo_scale, hi_scale = 0.0, 1.0
    while sum(_clipped(weights, hi_scale, low, high)) < 1.0 and hi_scale < 1e15:
        hi_scale *= 2.0
    for _ in range(60):
        middle = 0.5 * (lo_scale + hi_scale)
        if sum(_clipped(weights, middle, low, high)) < 1.0:
            lo_scale = middle
        else:
            hi_scale = middle
    shares = _clipped(weights, hi_scale, low, high)
    total = sum(shares)
    return [s / total for s in shares]


def _clipped(
    weights: Sequence[float], scale: float, low: Sequence[float], high: Sequence[float]
) -> list[float]:
    return [min(max(w * scale, lo), hi) for w, lo, hi in zip(weights, low, high, strict=True)]


def _scaled(low: Sequence[float], at_most: float) -> list[float]:
    total = sum(low)
    return [v * at_most / total for v in low] if total > at_most else list(low)


def _lifted(high: Sequence[float]) -> list[float]:
    total = sum(high)
    if total >= 1.0:
        return list(high)
    return [v / total for v in high] if total > 0.0 else [1.0] * len(high)


class DeficitCounters:
    """Deficit round-robin with continuous quanta: serves whoever is owed most, in cost.

    Each service of cost c credits everyone's share of c and charges c to the one served, so the
    credits sum to a constant and realised cost tracks the shares, however much costs differ.
    """

    def __init__(self, names: Sequence[str]) -> None:
        """Nobody is owed anything."""
        self._credit = dict.fromkeys(names, 0.0)

    def serve(self, shares: Mapping[str, float], costs: Mapping[str, float]) -> str:
        """Choose among the keys of `shares` (in that order on ties) and settle the accounts."""
        chosen = max(shares, key=lambda name: (self._credit[name], shares[name]))
        self.charge(chosen, shares, costs[chosen])
        return chosen

    def charge(self, chosen: str, shares: Mapping[str, float], cost: float) -> None:
        """Settle a service that was decided elsewhere."""
        total = sum(shares.values())
        for name, share in shares.items():
            self._credit[name] += cost * share / total
        self._credit[chosen] -= cost

    def forget(self, name: str) -> None:
        """Cancel what is owed to or by `name`: an absence earns no claim on the past."""
        self._credit[name] = 0.0

    def state(self) -> dict[str, float]:
        """Credits by name."""
        return dict(self._credit)

    @classmethod
    def from_state(cls, state: Mapping[str, float]) -> DeficitCounters:
        """Rebuild exactly."""
        counters = cls(())
        counters._credit = {name: float(value) for name, value in state.items()}
        return counters
