"""What happened since shares last moved, for policies that learn once per step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from burnish.schedule.values.base import NUM_BANDS, StepOutcome
from burnish.schedule.values.columns import Columns

_BY_BAND = ("scored", "passed")
_NAMES = ("groups", "spread", "cost")


class StepWindow:
    """Sums over the groups of a step, a row per domain."""

    def __init__(self, num_rows: int) -> None:
        """Empty."""
        self._bands = Columns(num_rows, dict.fromkeys(_BY_BAND, 0.0), width=NUM_BANDS)
        self._rows = Columns(num_rows, dict.fromkeys(_NAMES, 0.0))

    def judged(
        self, row: int, *, band: int, num_scored: int, pass_rate: float, spread: float, cost: float
    ) -> None:
        """One group came back; `band` says how difficult it was."""
        ok = float(num_scored > 0)
        self._bands["scored"][row, band] += num_scored
        self._bands["passed"][row, band] += num_scored * pass_rate
        self._rows["groups"][row] += ok
        self._rows["spread"][row] += spread * ok
        self._rows["cost"][row] += cost

    def take(self) -> StepOutcome:
        """All of it; the next window starts empty."""
        rows, bands = self._rows, self._bands
        outcome = StepOutcome(
            attempted_DK=bands["scored"],
            completed_DK=bands["scored"],
            passed_DK=bands["passed"],
            groups_D=rows["groups"],
            spread_D=rows["spread"],
            cost_D=rows["cost"],
            alignment_D=np.zeros(len(rows["cost"])),
        )
        for columns, names in ((bands, _BY_BAND), (rows, _NAMES)):
            for name in names:
                columns[name] = np.zeros_like(columns[name])
        return outcome

    def add_row(self) -> None:
        """One more domain."""
        self._bands.add_row()
        self._rows.add_row()

    def remove_row(self, row: int) -> None:
        """One less."""
        self._bands.remove_row(row)
        self._rows.remove_row(row)

    def state(self) -> dict[str, Any]:
        """The sums so far."""
        return {"bands": self._bands.state(), "rows": self._rows.state()}

    def load(self, state: Mapping[str, Any]) -> None:
        """Take them over."""
        self._bands.load(state["bands"])
        self._rows.load(state["rows"])
