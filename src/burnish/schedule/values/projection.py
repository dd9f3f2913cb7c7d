"""Shares within bounds."""

from __future__ import annotations

import numpy as np

from burnish.schedule.values.columns import Bools, Floats


def normalised(values: Floats, active: Bools) -> Floats:
    """Shares proportional to `values`; equal ones where nobody has a value."""
    kept = np.where(active, np.maximum(values, 0.0), 0.0)
    total = kept.sum()
    if not 0.0 < total < np.inf:
        kept, total = active.astype(np.float64), float(active.sum())
    shares: Floats = kept / max(total, 1e-300)
    return shares


def bounded(values: Floats, low: Floats, high: Floats, active: Bools) -> Floats:
    """Shares proportional to `values` within [low, high] (water filling), 0 where inactive.

    Bounds that cannot be met together give way: minima that sum to more than 1 are scaled down,
    and maxima that sum to less than 1 are lifted in proportion (this happens when quarantine
    leaves few domains).
    """
    shares = normalised(values, active)
    low = np.where(active, low, 0.0)
    high = np.where(active, high, 0.0)
    if np.all(shares >= low) and np.all(shares <= high):
        return shares
    low = low / max(low.sum(), 1.0)
    total = high.sum()
    if 0.0 < total < 1.0:
        high = high / total
    high = np.maximum(high, low)
    # A value of (almost) zero must still be able to take up what the others' maxima leave.
    weights = np.where(active, np.maximum(shares / shares.max(), 1e-12), 0.0)
    return _filled(weights, low, high)


def _filled(weights: Floats, low: Floats, high: Floats) -> Floats:
    """clip(weights * scale) grows with the scale: bisection in the exponent finds sum 1."""
    lo, hi = -60.0, 60.0
    for _ in range(60):
        middle = 0.5 * (lo + hi)
        if np.clip(weights * 2.0**middle, low, high).sum() < 1.0:
            lo = middle
        else:
            hi = middle
    shares = np.clip(weights * 2.0**hi, low, high)
    filled: Floats = shares / shares.sum()
    return filled
