"""From shares to groups: deficits in the policy's unit, the floor, and the starvation bound.

Each group charges its price to its domain and credits everybody's share of it, so realised use
tracks the shares however much prices differ. The price is an expectation; when the group is judged
(cost) or trained or dropped (tokens), the difference to what it really was is charged too. Filters,
stale groups and failures therefore cost a domain nothing of its share.

Bound of `next`: a domain that has waited its deadline of ceil(2 * sum(w) / (floor * w)) deals is
served before anything else, longest overdue first. Once served it is not overdue again for its
deadline, so each other domain comes before it at most once: nobody waits more than
deadline + D - 1 deals. `deal` serves whoever has waited `DEADLINE_STEPS` whatever it costs and
charges it to the floor: nobody waits longer than that.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from burnish.schedule.values.base import Unit
from burnish.schedule.values.columns import Bools, Columns, Floats

# Steps after which `deal` serves a domain whatever it costs. At 1,000 domains that is 40 groups of
# a step's thousands.
DEADLINE_STEPS = 25
# The overdue guard waits for twice what a floor that is fair in deals would need, so equal cost
# rules until costs differ by more than that.
_DEADLINE_FACTOR = 2.0


class Prices(NamedTuple):
    """What one group is expected to take, a row per domain, all above 0."""

    cost_D: Floats
    """Accelerator-seconds, or what is counted in their place."""
    tokens_D: Floats
    """Trained tokens, after what will be filtered, stale or failed."""


class Dealt(NamedTuple):
    """A step's worth of groups."""

    groups_D: Floats
    """By share."""
    probes_D: Floats
    """By the floor, in probes of one group per tier."""


class Dealer:
    """See the module text. Weights and shares come with every call; only accounts are state."""

    def __init__(self, num_rows: int, unit: Unit) -> None:
        """Nobody is owed anything."""
        self._unit = unit
        names = ("credit", "floor", "wait", "charged", "in_flight")
        self.rows = Columns(num_rows, dict.fromkeys(names, 0.0))
        self.floor_due = 0.0

    def price(self, prices: Prices) -> Floats:
        """In the unit of the shares."""
        if self._unit is Unit.GROUPS:
            return np.ones_like(prices.cost_D)
        return prices.cost_D if self._unit is Unit.COST else prices.tokens_D

    def deadlines(self, weight_D: Floats, floor: float) -> Floats:
        """Deals after which a waiting domain comes first."""
        deadlines: Floats = np.ceil(_DEADLINE_FACTOR * weight_D.sum() / (floor * weight_D))
        return deadlines

    def overdue(self, eligible_D: Bools, deadlines_D: Floats) -> int | None:
        """Whom `next` must serve now, if anybody."""
        excess = np.where(eligible_D, self.rows["wait"] - deadlines_D, -np.inf)
        row = int(excess.argmax())
        return row if excess[row] >= 0.0 else None

    def by_floor(self, eligible_D: Bools, weight_D: Floats) -> int:
        """Whom the floor owes most; the greater weight on ties, then the first."""
        return _most_owed(self.rows["floor"], weight_D, eligible_D)

    def by_share(self, eligible_D: Bools, share_D: Floats) -> int:
        """Whom the policy owes most."""
        return _most_owed(self.rows["credit"], share_D, eligible_D)

    def waited(self, eligible_D: Bools, row: int) -> None:
        """One deal went to `row`."""
        self.rows["wait"] += eligible_D
        self.rows["wait"][row] = 0.0

    def charge_floor(self, row: int, weight_D: Floats, eligible_D: Bools, cost: float) -> None:
        """Settle a service of the floor, in cost."""
        _charge(self.rows["floor"], row, weight_D, eligible_D, cost)

    def charge(self, row: int, share_D: Floats, eligible_D: Bools, price: float) -> None:
        """Settle a service by share, as expected; the rest follows when it is known."""
        _charge(self.rows["credit"], row, share_D, eligible_D, price)
        self.rows["charged"][row] += price
        self.rows["in_flight"][row] += 1.0

    def settle(self, row: int, unit: Unit, actual: float, share_D: Floats, active_D: Bools) -> None:
        """One group of `row` took `actual`; says nothing if shares are in another unit."""
        rows = self.rows
        if unit is not self._unit or rows["in_flight"][row] < 1.0:
            return
        expected = float(rows["charged"][row] / rows["in_flight"][row])
        rows["charged"][row] -= expected
        rows["in_flight"][row] -= 1.0
        _charge(rows["credit"], row, share_D, active_D, actual - expected)

    def forget(self, row: int) -> None:
        """Cancel what is owed to or by a domain: an absence earns no claim on the past."""
        for name in ("credit", "floor", "wait"):
            self.rows[name][row] = 0.0

    def deal(
        self,
        budget: float,
        share_D: Floats,
        weight_D: Floats,
        eligible_D: Bools,
        prices: Prices,
        *,
        floor: float,
        probe_cost_D: Floats,
        guarded: bool = True,
    ) -> Dealt:
        """A step's worth of groups for about `budget` of cost."""
        rows, price_D = self.rows, self.price(prices)
        fair_D = np.where(eligible_D, weight_D, 0.0)
        fair_D = fair_D / max(fair_D.sum(), 1e-300)
        rows["floor"] += floor * budget * fair_D
        probes_D = np.maximum(np.floor(rows["floor"] / probe_cost_D), 0.0) * eligible_D
        due = guarded & eligible_D & (rows["wait"] >= DEADLINE_STEPS - 1) & (probes_D == 0.0)
        probes_D = probes_D + due
        rows["floor"] -= probes_D * probe_cost_D
        left = max(budget - float((probes_D * probe_cost_D).sum()), 0.0)
        share_D = np.where(eligible_D, share_D, 0.0)
        total = share_D.sum()
        groups_D = np.zeros_like(share_D)
        if total > 0.0 and left > 0.0:
            share_D = share_D / total
            income = left / float((share_D * prices.cost_D / price_D).sum())
            rows["credit"] += share_D * income
            groups_D = np.maximum(np.floor(rows["credit"] / price_D), 0.0) * eligible_D
            rows["credit"] -= groups_D * price_D
        rows["wait"] = np.where(
            eligible_D & (groups_D + probes_D == 0.0),
            rows["wait"] + 1.0,
            rows["wait"] * ~eligible_D,
        )
        return Dealt(groups_D, probes_D)

    def correct(self, expected_D: Floats, actual_D: Floats) -> None:
        """What a step's groups took beyond what `deal` charged, in the unit of the shares."""
        self.rows["credit"] -= actual_D - expected_D

    def state(self) -> dict[str, Any]:
        """The accounts."""
        return {"rows": self.rows.state(), "floor_due": self.floor_due}

    def load(self, state: Mapping[str, Any]) -> None:
        """Take the accounts over."""
        self.rows.load(state["rows"])
        self.floor_due = float(state["floor_due"])


def _charge(account_D: Floats, row: int, share_D: Floats, among_D: Bools, amount: float) -> None:
    credit = np.where(among_D, share_D, 0.0)
    account_D += credit * (amount / max(float(credit.sum()), 1e-300))
    account_D[row] -= amount


def _most_owed(account_D: Floats, tie_D: Floats, eligible_D: Bools) -> int:
    owed = np.where(eligible_D, account_D, -np.inf)
    best = np.flatnonzero(owed == owed.max())
    return int(best[tie_D[best].argmax()])
