"""Value per cost with a protected floor (VPC-F): the default policy.

    value = E[speed+] * reach / practice * learnability**2 * trust * weight / cost per rollout
    share ~ value ** 0.7 within the declared bounds, moved half of the way per step

Speed, reach and practice are those of `practice.py`: their product is the gain in pass rate that
one more rollout is expected to bring. Of the speed its positive part counts: a domain that is known
to stand still can be left alone, one that is not known may be worth a try. Learnability is the
spread of scores inside groups, without which there is no gradient. Trust falls with what audits
find undeserved. Cost is per *scored* rollout: a domain whose machinery fails is a dear one. The
floor is dealt by the dealer; fairness mixes in what lags behind.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from burnish.schedule.values.base import NUM_BANDS, StepOutcome, Unit, View
from burnish.schedule.values.columns import Columns, Floats
from burnish.schedule.values.practice import PracticeCurves, Speeds
from burnish.schedule.values.projection import bounded, normalised

# Scale of a logistic distribution over its standard deviation.
_LOGISTIC_SCALE = math.sqrt(3.0) / math.pi
# Shares go with value**0.7. Values are estimates: what looks best is partly luck, and a domain that
# gets nothing cannot correct what is thought of it. On four tuning seeds 1, 1.5 and 2 closed 2 %,
# 12 % and 23 % less of the gap to an oracle than 0.7 where nothing misleads.
_SHARPNESS = 0.7
# Part of the way to the new target that shares move per training step: a noisy step cannot swing
# the mix of a batch.
_SHARE_SMOOTHING = 0.5
# The norm of a policy gradient goes with the spread of scores, and so does its direction's signal.
_LEARNABILITY_POWER = 2.0
# Nothing is left of a domain's value when an audit finds a quarter of its passes undeserved: what
# it still seems to gain is more of the same.
_DISTRUST = 4.0
_TERMS = ("slope", "slope_sd", "learnability", "false_pass", "cost", "value", "target")


class ValuePerCost:
    """See the module text."""

    unit = Unit.COST
    protects = True

    def __init__(self, num_rows: int, *, fairness: float = 0.0, num_bands: int = NUM_BANDS) -> None:
        """Nothing seen yet.

        Args:
            num_rows: domains.
            fairness: part of the shares that goes to those that lag behind, 0 to 1.
            num_bands: of difficulty.
        """
        self._fairness = fairness
        self._curves = PracticeCurves(num_rows, num_bands)
        # A share below 0 has not been decided yet.
        self._rows = Columns(num_rows, {"share": -1.0, **dict.fromkeys(_TERMS, 0.0)})

    def observe(self, outcome: StepOutcome) -> None:
        """The step's groups, on the lines of their domains."""
        spread_D = outcome.spread_D / np.maximum(outcome.groups_D, 1e-9)
        practice_D = outcome.completed_DK.sum(axis=1) * spread_D**_LEARNABILITY_POWER
        self._curves.add(outcome.completed_DK, outcome.passed_DK, practice_D)

    def decide(self, view: View) -> Floats:
        """Shares of what lies above the floor."""
        rows, curves = self._rows, self._curves
        speeds = curves.speeds()
        gain_D = curves.reach() / curves.depth() * view.learnability_D**_LEARNABILITY_POWER
        rows["slope"], rows["slope_sd"] = speeds.mean_D * gain_D, speeds.sd_D * gain_D
        rows["learnability"], rows["cost"] = view.learnability_D, view.cost_D
        rows["false_pass"] = view.false_pass_D
        trust = np.maximum(1.0 - _DISTRUST * view.false_pass_D, 0.0)
        value = _expected_gain(speeds) * gain_D * trust * view.weight_D / view.cost_D
        rows["value"] = value
        best = value[view.active_D].max(initial=0.0)
        softened = (value / best) ** _SHARPNESS if best > 0.0 else np.ones_like(value)
        mixed = normalised(softened, view.active_D) * (1.0 - self._fairness)
        mixed = mixed + self._fairness * normalised(self._behind() * view.weight_D, view.active_D)
        target = bounded(mixed, view.low_D, view.high_D, view.active_D)
        rows["target"] = target
        before = rows["share"]
        moved = np.where(before < 0.0, target, before + _SHARE_SMOOTHING * (target - before))
        rows["share"] = np.where(view.active_D, moved, before)
        return normalised(rows["share"], view.active_D)

    def _behind(self) -> Floats:
        """How far behind domains are: what they fail, over what they have practised."""
        behind: Floats = (1.0 - self._curves.level()) / self._curves.depth()
        return behind

    def explain(self, row: int) -> dict[str, float]:
        """The factors of the value."""
        return {name: float(self._rows[name][row]) for name in ("share", *_TERMS)}

    def add_row(self) -> None:
        """One more domain."""
        self._curves.add_row()
        self._rows.add_row()

    def remove_row(self, row: int) -> None:
        """One less."""
        self._curves.remove_row(row)
        self._rows.remove_row(row)

    def state(self) -> dict[str, Any]:
        """Curves and shares."""
        return {"curves": self._curves.state(), "rows": self._rows.state()}

    def load(self, state: Mapping[str, Any]) -> None:
        """Take both over."""
        self._curves.load(state["curves"])
        self._rows.load(state["rows"])


def _expected_gain(speeds: Speeds) -> Floats:
    """Mean of the positive part, the posterior taken as logistic: softplus in its scale."""
    scale_D = _LOGISTIC_SCALE * np.maximum(speeds.sd_D, 1e-9)
    gain: Floats = scale_D * np.logaddexp(0.0, speeds.mean_D / scale_D)
    return gain
