"""What happened since shares last moved, for policies that learn once per step."""

from __future__ import annotations

import numpy as np

from burnish.schedule.values.base import StepOutcome
from burnish.schedule.values.columns import Columns

_NAMES = ("scored", "passed", "rate", "groups", "spread", "cost")


class StepWindow:
    """Sums over the groups of a step, a row per domain, of a run without tiers."""

    def __init__(self, num_rows: int) -> None:
        """Empty."""
        self.rows = Columns(num_rows, dict.fromkeys(_NAMES, 0.0))

    def judged(
        self,
        row: int,
        *,
        num_scored: int,
        pass_rate: float,
        level: float,
        spread: float,
        cost: float,
    ) -> None:
        """One group came back; the whole domain passes at `level` now."""
        rows, ok = self.rows, float(num_scored > 0)
        rows["scored"][row] += num_scored
        rows["passed"][row] += num_scored * pass_rate
        rows["rate"][row] += level * ok
        rows["groups"][row] += ok
        rows["spread"][row] += spread * ok
        rows["cost"][row] += cost

    def take(self) -> StepOutcome:
        """All of it; the next window starts empty."""
        rows = self.rows
        outcome = StepOutcome(
            attempted_DK=rows["scored"][:, None],
            completed_DK=rows["scored"][:, None],
            passed_DK=rows["passed"][:, None],
            rate_D=rows["rate"] / np.maximum(rows["groups"], 1.0),
            groups_D=rows["groups"],
            spread_D=rows["spread"],
            cost_D=rows["cost"],
            alignment_D=np.zeros(len(rows["cost"])),
        )
        for name in _NAMES:
            rows[name] = np.zeros_like(rows[name])
        return outcome

    def add_row(self) -> None:
        """One more domain."""
        self.rows.add_row()

    def remove_row(self, row: int) -> None:
        """One less."""
        self.rows.remove_row(row)
