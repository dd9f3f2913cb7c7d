"""Value per cost with a protected floor (VPC-F): the default policy.

    value = (slope + 1.5 sd)+ * learnability**1.5 * (1 - false passes) * weight / cost per rollout
    share ~ value ** 1.5 within the declared bounds, moved half of the way per step

The slope is the posterior gain in pass rate per unit of signal (`slope.py`), optimistic so that the
unknown is tried; learnability is the spread of scores inside groups, without which there is no
gradient, and signal counts each rollout by the spread of its group. Before a domain's own slope is
known it is expected to fall with what it was trained on: returns diminish. Cost is per *scored*
rollout: a domain whose machinery fails is a dear one. The floor is dealt by the dealer; fairness
mixes equal cost into the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from burnish.schedule.values.base import StepOutcome, Unit, View
from burnish.schedule.values.columns import Columns, Floats
from burnish.schedule.values.projection import bounded, normalised
from burnish.schedule.values.slope import SlopeTable, shrink

# Optimism in posterior standard deviations: 1.5 was best of {0, 0.5, 1.5} in simulation, and flat.
_OPTIMISM = 1.5
# Shares go with value**1.5: sharper than proportional, still spread when values are close.
_SHARPNESS = 1.5
# Part of the way to the new target that shares move per training step: a noisy step cannot swing
# the mix of a batch.
_SHARE_SMOOTHING = 0.5
# What a rollout teaches goes with the square of its group's spread, but the spread is measured with
# noise, and so is the slope it multiplies: of {0.5, 1, 1.5, 2} on the tuning seeds 1.5 was best.
_LEARNABILITY_POWER = 1.5
# Expected slopes go with 1 / (signal so far + this part of the domains' mean + a few groups).
_HEAD_START = 0.25
_HEAD_START_ROLLOUTS = 30.0
# Discount per group of the regression: remembers about 200 groups, the scale on which a pass rate
# moves visibly.
_SLOPE_DISCOUNT = 0.995
# Groups of one step that count in the regression: the others share its weights and its noise.
_MOST_GROUPS = 4.0
# Posterior means of tiers change slowly, so their errors repeat from step to step: the variance of
# a slope through them is about eight times that through independent points.
_SMOOTHED_INFLATION = 8.0
_TERMS = ("slope", "slope_sd", "learnability", "false_pass", "cost", "value", "target")


class ValuePerCost:
    """See the module text."""

    unit = Unit.COST
    protects = True

    def __init__(self, num_rows: int, *, fairness: float = 0.0, smoothed: bool = False) -> None:
        """Nothing seen yet.

        Args:
            num_rows: domains.
            fairness: part of the shares that is equal cost whatever the value, 0 to 1.
            smoothed: whether observed rates are posterior means over tiers, not raw ones.
        """
        self._fairness = fairness
        self._inflation = _SMOOTHED_INFLATION if smoothed else 1.0
        self._lines = SlopeTable(num_rows)
        # A share below 0 has not been decided yet.
        names = {"signal": 0.0, "share": -1.0, **dict.fromkeys(_TERMS, 0.0)}
        self._rows = Columns(num_rows, names)

    def observe(self, outcome: StepOutcome) -> None:
        """One point per domain on its line: the step's groups."""
        spread_D = outcome.spread_D / np.maximum(outcome.groups_D, 1e-9)
        self._rows["signal"] += outcome.completed_DK.sum(axis=1) * spread_D
        weight_D = np.minimum(outcome.groups_D, _MOST_GROUPS)
        self._lines.add(self._rows["signal"], outcome.rate_D, weight_D, _SLOPE_DISCOUNT)

    def decide(self, view: View) -> Floats:
        """Shares of what lies above the floor."""
        rows = self._rows
        slopes = shrink(self._lines.estimate(self._inflation), self._shape())
        # For people, per rollout.
        rows["slope"], rows["slope_sd"] = (s * view.learnability_D for s in slopes)
        rows["learnability"], rows["cost"] = view.learnability_D, view.cost_D
        rows["false_pass"] = view.false_pass_D
        optimistic = np.maximum(slopes.mean_D + _OPTIMISM * slopes.sd_D, 0.0)
        trusted = view.learnability_D**_LEARNABILITY_POWER * (1.0 - view.false_pass_D)
        value = optimistic * trusted * view.weight_D / view.cost_D
        rows["value"] = value
        best = value[view.active_D].max(initial=0.0)
        sharpened = (value / best) ** _SHARPNESS if best > 0.0 else np.ones_like(value)
        fair = normalised(view.weight_D, view.active_D)
        mixed = normalised(sharpened, view.active_D) * (1.0 - self._fairness)
        mixed = mixed + self._fairness * fair
        target = bounded(mixed, view.low_D, view.high_D, view.active_D)
        rows["target"] = target
        before = rows["share"]
        moved = np.where(before < 0.0, target, before + _SHARE_SMOOTHING * (target - before))
        rows["share"] = np.where(view.active_D, moved, before)
        return normalised(rows["share"], view.active_D)

    def _shape(self) -> Floats:
        """Slopes to expect of the domains, relative to each other: mean 1."""
        signal = self._rows["signal"]
        shape = 1.0 / (signal + _HEAD_START * signal.mean() + _HEAD_START_ROLLOUTS)
        relative: Floats = shape / shape.mean()
        return relative

    def explain(self, row: int) -> dict[str, float]:
        """The factors of the value."""
        return {name: float(self._rows[name][row]) for name in ("share", *_TERMS)}

    def add_row(self) -> None:
        """One more domain."""
        self._lines.rows.add_row()
        self._rows.add_row()

    def remove_row(self, row: int) -> None:
        """One less."""
        self._lines.rows.remove_row(row)
        self._rows.remove_row(row)

    def state(self) -> dict[str, Any]:
        """Both tables."""
        return {"lines": self._lines.state(), "rows": self._rows.state()}

    def load(self, state: Mapping[str, Any]) -> None:
        """Take both over."""
        self._lines.load(state["lines"])
        self._rows.load(state["rows"])
