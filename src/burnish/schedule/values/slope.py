"""Posterior slope of a pass rate: how much one more rollout is expected to raise it.

A weighted least-squares line through (rollouts so far, pass rate), older points discounted, then
shrunk toward what domains do on average (empirical Bayes). The shrinkage matters: the standard
error of one group's pass rate is about 0.2 and the slopes sought are about 1e-4 per rollout, so the
raw slope of a single domain is noise for its first dozens of groups.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from burnish.schedule.values.columns import Columns, Floats

# Prior knowledge of the residual variance, worth this many groups. Group pass rates of a domain
# with mixed difficulty scatter with a standard deviation of about 0.3.
_PRIOR_GROUPS = 4.0
_PRIOR_VARIANCE = 0.1
# Slope expected before anything is known: from nothing to everything in 5,000 rollouts. It counts
# as much as one well-measured domain, so that a run that begins with a domain standing still does
# not conclude that all the others do.
PRIOR_SLOPE = 2e-4
# Spread of the prior relative to its mean: wide enough that 95 % of it reaches from "gets worse" to
# four times the average slope.
_PRIOR_SPREAD = 1.5


class Slopes(NamedTuple):
    """Slopes with their uncertainty, a row per domain."""

    mean_D: Floats
    """Change of pass rate per rollout."""
    sd_D: Floats
    """Standard deviation of that; infinite while unknown."""


class SlopeTable:
    """Weighted regression lines in constant memory, numerically centred (West 1979)."""

    def __init__(self, num_rows: int) -> None:
        """Start without observations."""
        names = ("points", "weight", "mean_x", "mean_y", "sxx", "sxy", "syy")
        self.rows = Columns(num_rows, dict.fromkeys(names, 0.0))

    def add(self, x_D: Floats, y_D: Floats, weight_D: Floats, discount: float) -> None:
        """Take one point per row with its weight; rows of weight 0 stay as they are."""
        rows = self.rows
        seen = weight_D > 0.0
        factor = np.where(seen, discount**weight_D, 1.0)
        total = rows["weight"] * factor + weight_D
        part = weight_D / np.maximum(total, 1e-300)
        dx, dy = x_D - rows["mean_x"], y_D - rows["mean_y"]
        kept = weight_D * (1.0 - part)
        rows["sxx"] = rows["sxx"] * factor + kept * dx * dx
        rows["sxy"] = rows["sxy"] * factor + kept * dx * dy
        rows["syy"] = rows["syy"] * factor + kept * dy * dy
        rows["mean_x"] = rows["mean_x"] + part * dx
        rows["mean_y"] = rows["mean_y"] + part * dy
        rows["weight"] = total
        rows["points"] = rows["points"] * factor + seen

    def estimate(self, inflation: float = 1.0) -> Slopes:
        """Least-squares slopes and their standard errors, (0, inf) while undefined.

        `inflation` multiplies the variance where points are not independent.
        """
        rows = self.rows
        known = rows["sxx"] > 0.0
        sxx = np.where(known, rows["sxx"], 1.0)
        slope = np.where(known, rows["sxy"] / sxx, 0.0)
        residual = np.maximum(rows["syy"] - slope * rows["sxy"], 0.0)
        prior = _PRIOR_GROUPS * _PRIOR_VARIANCE
        # A point of weight w is a mean over w groups: w times its squared residual is the variance
        # of one group, so that the sum is divided by points.
        variance = (residual + prior) / (rows["points"] + _PRIOR_GROUPS)
        return Slopes(slope, np.where(known, np.sqrt(inflation * variance / sxx), np.inf))

    def state(self) -> dict[str, Any]:
        """The table."""
        return self.rows.state()

    def load(self, state: Mapping[str, Any]) -> None:
        """Take it over."""
        self.rows.load(state)


def shrink(slopes: Slopes, shape_D: Floats | None = None) -> Slopes:
    """Posterior slopes under a normal prior fitted to all of them (empirical Bayes).

    The prior is the same for all, or goes with `shape_D` where that is given (mean 1).

    A domain without data is taken to be average rather than worthless. The prior mean is the mean
    of the non-negative parts, weighted as in a random-effects model (DerSimonian and Laird 1986):
    however well one domain is measured, it is only one domain.
    """
    if shape_D is not None:
        alike = shrink(Slopes(slopes.mean_D / shape_D, slopes.sd_D / shape_D))
        return Slopes(alike.mean_D * shape_D, alike.sd_D * shape_D)
    between = (_PRIOR_SPREAD * PRIOR_SLOPE) ** 2
    weights = 1.0 / (slopes.sd_D**2 + between)
    known = float((weights * np.maximum(slopes.mean_D, 0.0)).sum())
    mu = (known + PRIOR_SLOPE / between) / (float(weights.sum()) + 1.0 / between)
    prior_precision = 1.0 / (_PRIOR_SPREAD * mu) ** 2
    own = 1.0 / slopes.sd_D**2
    total = prior_precision + own
    return Slopes((mu * prior_precision + slopes.mean_D * own) / total, np.sqrt(1.0 / total))
