"""Posterior slope of a domain's pass rate: how much one more rollout is expected to raise it.

A weighted least-squares line through (rollouts so far, pass rate of the group), older groups
discounted, then shrunk toward what domains do on average (empirical Bayes). The shrinkage matters:
the standard error of one group's pass rate is about 0.2 and the slopes sought are about 1e-4 per
rollout, so the raw slope of a single domain is noise for its first dozens of groups.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

# Prior knowledge of the residual variance, worth this many groups. Group pass rates of a domain
# with mixed difficulty scatter with a standard deviation of about 0.3.
_PRIOR_GROUPS = 4.0
_PRIOR_VARIANCE = 0.1
# Slope expected before anything is known: from nothing to everything in 5,000 rollouts. It counts
# as much as one well-measured domain, so that a run that begins with a domain standing still does
# not conclude that all the others do.
_PRIOR_SLOPE = 2e-4
# Spread of the prior relative to its mean: wide enough that 95 % of it reaches from "gets worse" to
# four times the average slope.
_PRIOR_SPREAD = 1.5


class SlopeEstimate(NamedTuple):
    """A slope with its uncertainty."""

    mean: float
    """Change of pass rate per rollout."""
    sd: float
    """Standard deviation of that; infinite while unknown."""


class DiscountedSlope:
    """Weighted regression line in constant memory, numerically centred (West 1979)."""

    def __init__(self) -> None:
        """Start without observations."""
        self._weight = 0.0
        self._mean_x = 0.0
        self._mean_y = 0.0
        self._sxx = 0.0
        self._sxy = 0.0
        self._syy = 0.0

    def add(self, x: float, y: float, discount: float) -> None:
        """Take one observation of unit weight after discounting all earlier ones."""
        self._weight *= discount
        self._sxx *= discount
        self._sxy *= discount
        self._syy *= discount
        self._weight += 1.0
        dx = x - self._mean_x
        dy = y - self._mean_y
        self._mean_x += dx / self._weight
        self._mean_y += dy / self._weight
        self._sxx += dx * (x - self._mean_x)
        self._sxy += dx * (y - self._mean_y)
        self._syy += dy * (y - self._mean_y)

    def estimate(self) -> SlopeEstimate:
        """Least-squares slope and its standard error, (0, inf) while undefined."""
        if self._sxx <= 0.0:
            return SlopeEstimate(0.0, math.inf)
        slope = self._sxy / self._sxx
        residual = max(self._syy - slope * self._sxy, 0.0)
        variance = (residual + _PRIOR_GROUPS * _PRIOR_VARIANCE) / (self._weight + _PRIOR_GROUPS)
        return SlopeEstimate(slope, math.sqrt(variance / self._sxx))

    def state(self) -> list[float]:
        """All that `from_state` needs."""
        return [self._weight, self._mean_x, self._mean_y, self._sxx, self._sxy, self._syy]

    @classmethod
    def from_state(cls, state: Any) -> DiscountedSlope:
        """Rebuild exactly."""
        line = cls()
        (
            line._weight,
            line._mean_x,
            line._mean_y,
            line._sxx,
            line._sxy,
            line._syy,
        ) = (float(v) for v in state)
        return line


def shrink(estimates: Sequence[SlopeEstimate]) -> list[SlopeEstimate]:
    """Posterior slopes under a normal prior fitted to all of them (empirical Bayes).

    A domain without data is taken to be average rather than worthless. The prior mean is the mean
    of the non-negative parts, weighted as in a random-effects model (DerSimonian and Laird 1986):
    however well one domain is measured, it is only one domain.
    """
    between = (_PRIOR_SPREAD * _PRIOR_SLOPE) ** 2
    weights = [1.0 / (e.sd**2 + between) for e in estimates]
    known = sum(w * max(e.mean, 0.0) for w, e in zip(weights, estimates, strict=True))
    mu = (known + _PRIOR_SLOPE / between) / (sum(weights) + 1.0 / between)
    prior_precision = 1.0 / (_PRIOR_SPREAD * mu) ** 2
    posterior = []
    for e in estimates:
        own = 0.0 if math.isinf(e.sd) else 1.0 / e.sd**2
        total = prior_precision + own
        mean = (mu * prior_precision + e.mean * own) / total
        posterior.append(SlopeEstimate(mean, math.sqrt(1.0 / total)))
    return posterior
