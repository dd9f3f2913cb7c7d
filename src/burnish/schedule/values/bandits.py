"""Published rules that learn which domain to train, as baselines behind the same interface.

None of them knows what a rollout costs or protects a floor; that is how they were published.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from burnish.schedule.values.base import StepOutcome, View
from burnish.schedule.values.columns import Floats
from burnish.schedule.values.fixed import Rule, softmax


def _advantage(outcome: StepOutcome) -> Floats:
    """Mean absolute group-normalised advantage: for pass or fail this is the spread."""
    return outcome.spread_D / np.maximum(outcome.groups_D, 1e-9)


class Sec(Rule):
    """Self-evolving curriculum (arXiv 2505.14970): softmax of a moving mean of |advantage|."""

    defaults: ClassVar[Mapping[str, float]] = {"quality": 0.0}

    def observe(self, outcome: StepOutcome) -> None:
        """Q <- 0.3 r + 0.7 Q where there was a group."""
        seen = outcome.groups_D > 0
        q = self.rows["quality"]
        self.rows["quality"] = np.where(seen, 0.3 * _advantage(outcome) + 0.7 * q, q)

    def scores(self, view: View) -> Floats:
        """Temperature 0.1."""
        return softmax(self.rows["quality"] / 0.1, view)


class Dump(Rule):
    """DUMP (arXiv 2504.09710): an upper confidence bound on |advantage|, softmax at 0.1."""

    defaults: ClassVar[Mapping[str, float]] = {"quality": 0.0, "visits": 0.0}

    def observe(self, outcome: StepOutcome) -> None:
        """A moving mean stands in for the window of 300."""
        seen = outcome.groups_D > 0
        q = self.rows["quality"]
        self.rows["quality"] = np.where(seen, 0.1 * _advantage(outcome) + 0.9 * q, q)
        self.rows["visits"] += outcome.completed_DK.sum(axis=1)

    def scores(self, view: View) -> Floats:
        """Mean + sqrt(2 ln(N + 1) / (n + 1))."""
        n = self.rows["visits"]
        bonus = np.sqrt(2.0 * np.log(n.sum() + 1.0) / (n + 1.0))
        return softmax((self.rows["quality"] + bonus) / 0.1, view)


class Tscl(Rule):
    """Teacher-student curriculum (arXiv 1707.00183): act on the size of the last change.

    Boltzmann at 0.01 over |Q|, with a tenth uniform; |Q| also catches forgetting.
    """

    defaults: ClassVar[Mapping[str, float]] = {"quality": 0.0, "last": 0.5}

    def observe(self, outcome: StepOutcome) -> None:
        """Q <- Q + 0.05 (change of the pass rate - Q)."""
        completed = outcome.completed_DK.sum(axis=1)
        seen = completed > 0
        rate = outcome.passed_DK.sum(axis=1) / np.maximum(completed, 1e-9)
        q, last = self.rows["quality"], self.rows["last"]
        self.rows["quality"] = np.where(seen, q + 0.05 * (rate - last - q), q)
        self.rows["last"] = np.where(seen, rate, last)

    def scores(self, view: View) -> Floats:
        """Nine tenths Boltzmann."""
        num_active = max(int(view.active_D.sum()), 1)
        return 0.9 * softmax(np.abs(self.rows["quality"]) / 0.01, view) + 0.1 / num_active


class MtGrpo(Rule):
    """MT-GRPO (arXiv 2602.05547): weights rise for tasks that are low and stand still."""

    defaults: ClassVar[Mapping[str, float]] = {"weight": 0.0, "pass": 0.5, "before": 0.5}

    def observe(self, outcome: StepOutcome) -> None:
        """Moving mean of the pass rate, then one step on the logits of the weights."""
        completed = outcome.completed_DK.sum(axis=1)
        seen = completed > 0
        rate = outcome.passed_DK.sum(axis=1) / np.maximum(completed, 1e-9)
        before = self.rows["pass"]
        now = np.where(seen, 0.95 * before + 0.05 * rate, before)
        gain = now - before
        step = 0.05 * (20.0 * gain + 0.3 * (now - now.mean()))
        self.rows["weight"] = np.clip(self.rows["weight"] - step, -4.0, 4.0)
        self.rows["before"], self.rows["pass"] = before, now

    def scores(self, view: View) -> Floats:
        """Softmax of the weights."""
        return softmax(self.rows["weight"], view)


class Tac(Rule):
    """TAC (arXiv 2606.25178): |advantage| times how far a domain's gradient helps the others."""

    defaults: ClassVar[Mapping[str, float]] = {"quality": 0.0, "transfer": 0.0}

    def observe(self, outcome: StepOutcome) -> None:
        """Moving means of both."""
        seen = outcome.groups_D > 0
        for name, value in (("quality", _advantage(outcome)), ("transfer", outcome.alignment_D)):
            old = self.rows[name]
            self.rows[name] = np.where(seen, 0.7 * old + 0.3 * value, old)

    def scores(self, view: View) -> Floats:
        """Temperature 0.1 over the product."""
        transfer = 0.5 * (1.0 + self.rows["transfer"])
        return softmax(self.rows["quality"] * transfer / 0.1, view)
