"""Rules that look at little or nothing: what every cleverer one must beat."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from burnish.schedule.values.base import StepOutcome, Unit, View
from burnish.schedule.values.columns import Columns, Floats
from burnish.schedule.values.projection import bounded, normalised


class Rule(ABC):
    """Base of policies whose state, if any, is a table with a row per domain."""

    unit = Unit.GROUPS
    protects = False
    defaults: ClassVar[Mapping[str, float]] = {}
    """Columns of the state and their values for a newcomer."""

    def __init__(self, num_rows: int) -> None:
        """Nothing seen yet."""
        self.rows = Columns(num_rows, {"share": 0.0, **self.defaults})

    def observe(self, outcome: StepOutcome) -> None:  # noqa: B027
        """Nothing to learn."""

    @abstractmethod
    def scores(self, view: View) -> Floats:
        """What shares are proportional to."""

    def decide(self, view: View) -> Floats:
        """Scores within the declared bounds."""
        shares = bounded(self.scores(view), view.low_D, view.high_D, view.active_D)
        self.rows["share"] = shares
        return shares

    def explain(self, row: int) -> dict[str, float]:
        """The row of the state."""
        return {name: float(self.rows[name][row]) for name in ("share", *self.defaults)}

    def add_row(self) -> None:
        """One more domain."""
        self.rows.add_row()

    def remove_row(self, row: int) -> None:
        """One less."""
        self.rows.remove_row(row)

    def state(self) -> dict[str, Any]:
        """The table."""
        return {"rows": self.rows.state()}

    def load(self, state: Mapping[str, Any]) -> None:
        """Take the table over."""
        self.rows.load(state["rows"])


class Uniform(Rule):
    """Equal numbers of prompts, by weight."""

    def scores(self, view: View) -> Floats:
        """The weights."""
        return view.weight_D


class EqualCost(Rule):
    """Equal accelerator-seconds, by weight: the simplest rule that knows what things cost."""

    unit = Unit.COST

    def scores(self, view: View) -> Floats:
        """The weights."""
        return view.weight_D


class Static(Rule):
    """Declared ratios, held on trained tokens (as Nemotron-3 holds them on batches)."""

    unit = Unit.TOKENS

    def scores(self, view: View) -> Floats:
        """The weights."""
        return view.weight_D


class Proportional(Rule):
    """As many prompts as a domain has data for."""

    def scores(self, view: View) -> Floats:
        """The sizes."""
        return view.size_D * view.weight_D


class RoundRobin(Rule):
    """A tenth of the domains at a time, in turn."""

    def scores(self, view: View) -> Floats:
        """1 for those whose turn it is."""
        active = np.flatnonzero(view.active_D)
        turn = max(1, len(active) // 10)
        scores = np.zeros(len(view.active_D))
        scores[active[(view.step * turn + np.arange(turn)) % len(active)]] = 1.0
        return scores


class HardFirst(Rule):
    """One minus the pass rate (Kimi k1.5, arXiv 2501.12599): the worse, the more."""

    def scores(self, view: View) -> Floats:
        """A thousandth keeps solved domains alive."""
        scores: Floats = (1.001 - view.pass_DK.mean(axis=1)) * view.weight_D
        return scores


def softmax(scores: Floats, view: View) -> Floats:
    """Of the active ones."""
    best = scores[view.active_D].max()
    return normalised(np.exp(np.minimum(scores - best, 0.0)), view.active_D)
