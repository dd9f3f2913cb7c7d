"""Value per cost with a protected floor (VPC-F): the default policy.

    value = (speed + sd)+ * reach / practice * learnability**2 * trust * weight / cost per rollout
    share ~ value ** 0.7 within the declared bounds, moved half of the way per step

Speed, reach and practice are those of `practice.py`: their product is the gain in pass rate that
one more rollout is expected to bring, optimistic so that the unknown is tried. Learnability is the
spread of scores inside groups, without which there is no gradient. Trust falls with what audits
find undeserved. Cost is per *scored* rollout: a domain whose machinery fails is a dear one. The
floor is dealt by the dealer; fairness mixes in what lags behind.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from burnish.schedule.values.base import NUM_BANDS, StepOutcome, Unit, View
from burnish.schedule.values.columns import Columns, Floats
from burnish.schedule.values.practice import PracticeCurves
from burnish.schedule.values.projection import bounded, normalised

# Optimism in posterior standard deviations.
_OPTIMISM = 1.0
# Shares go with value**0.7. Values are estimates: what looks best is partly luck, and a domain that
# gets nothing cannot correct what is thought of it. On the tuning seeds 1, 1.5 and 2 closed 2 %,
# 12 % and 23 % less of the gap to an oracle than 0.7.
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
        optimistic = np.maximum(rows["slope"] + _OPTIMISM * rows["slope_sd"], 0.0)
        trust = np.maximum(1.0 - _DISTRUST * view.false_pass_D, 0.0)
        value = optimistic * trust * view.weight_D / view.cost_D
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
