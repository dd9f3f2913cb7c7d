"""Exact paired tests, correction for many of them, and how much a sample can show at all."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from statistics import NormalDist

# Finest grid on which the sign-flip distribution is enumerated: exact for any common sample size up
# to 60 and for most mixed ones, and 100 tasks take 0.2 s at the worst.
_GRID = 60


def mcnemar_exact(only_after: int, only_before: int) -> float:
    """Two-sided exact p-value of a paired binary comparison (McNemar 1947): a sign test."""
    num = only_after + only_before
    tail = sum(math.comb(num, i) for i in range(min(only_after, only_before) + 1))
    return min(float(Fraction(2 * tail, 2**num)), 1.0)


def sign_flip_exact(diffs: Sequence[Fraction]) -> float:
    """Two-sided exact p-value of "before and after are exchangeable within each task".

    The distribution of the summed differences over all sign flips, by dynamic programming. With
    one sample per task it equals `mcnemar_exact`. Differences that do not fit the grid are rounded
    to it and the p-value is rounded up accordingly.
    """
    scale = math.lcm(*(d.denominator for d in diffs)) if diffs else 1
    slack = 0
    if scale > _GRID:
        scale, slack = _GRID, len(diffs)
    steps = [round(abs(d) * scale) for d in diffs if d]
    observed = abs(sum(round(d * scale) for d in diffs))
    divisor = math.gcd(*steps) if steps and not slack else 1
    steps = [s // divisor for s in steps]
    threshold = max(observed - slack, 0) / divisor
    chances = {0: 1.0}
    for step in steps:
        flipped: dict[int, float] = {}
        for total, chance in chances.items():
            half = 0.5 * chance
            flipped[total + step] = flipped.get(total + step, 0.0) + half
            flipped[total - step] = flipped.get(total - step, 0.0) + half
        chances = flipped
    return min(math.fsum(c for total, c in chances.items() if abs(total) >= threshold), 1.0)


def holm(p_values: Mapping[str, float]) -> dict[str, float]:
    """p-values adjusted for their number: the chance of any false alarm stays below alpha.

    Step-down (Holm 1979); valid under any dependence.
    """
    adjusted, running = {}, 0.0
    ordered = sorted(p_values, key=lambda name: p_values[name])
    for rank, name in enumerate(ordered):
        running = max(running, min((len(ordered) - rank) * p_values[name], 1.0))
        adjusted[name] = running
    return {name: adjusted[name] for name in p_values}


def pass_at_k(num: int, num_passed: int, k: int) -> float:
    """Unbiased chance that at least one of k samples passes (Chen et al. 2021, eq. 1)."""
    assert 0 <= num_passed <= num
    assert 1 <= k <= num
    return 1.0 - float(Fraction(math.comb(num - num_passed, k), math.comb(num, k)))


def smoothed_spread(diffs: Sequence[float]) -> float:
    """Root mean square of task differences with two pseudo-tasks at -1 and +1.

    For one sample per task its square is the discordance. The pseudo-tasks keep a small sample
    without any discordance from claiming that it could have seen everything.
    """
    return math.sqrt((sum(d * d for d in diffs) + 2.0) / (len(diffs) + 2.0))


def detectable_effect(diffs: Sequence[float], alpha: float = 0.05, power: float = 0.8) -> float:
    """Smallest true difference that a two-sided paired test of this size finds with `power`.

    Normal approximation: with discordance d, n = 7.85 * d / effect^2 at 5 % and 80 %. At most 1.
    """
    if not diffs:
        return 1.0
    z = NormalDist().inv_cdf(1.0 - alpha / 2.0) + NormalDist().inv_cdf(power)
    return min(z * smoothed_spread(diffs) / math.sqrt(len(diffs)), 1.0)


def noninferiority_power(diffs: Sequence[float], margin: float, alpha: float = 0.05) -> float:
    """Chance to show "not worse by `margin`" (one-sided) if nothing has changed."""
    if not diffs:
        return 0.0
    error = smoothed_spread(diffs) / math.sqrt(len(diffs))
    return NormalDist().cdf(margin / error - NormalDist().inv_cdf(1.0 - alpha))
