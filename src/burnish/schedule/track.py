"""What is known about domains: where their indices stand, how they go, what they cost."""

from __future__ import annotations

import numpy as np

from burnish.schedule.values.columns import Columns, Floats
from burnish.schedule.values.dealer import Prices

# Discount per judged group of rates and costs: about 33 groups, so that a domain that starts or
# stops carrying signal is noticed within a few steps.
_RATE_DISCOUNT = 0.97
# Costs below a billionth of a second or token count as unknown: that is a rollout that never
# sampled, not a bargain.
_MIN_COST = 1e-9
# Part of a group's tokens that is expected to train at least: a domain whose groups are all
# filtered must not become priceless, since it would then take the whole budget.
_MIN_TRAINED_RATIO = 0.05

_TOTALS = ("next_index", "num_floor_picks", "num_rollouts", "total_cost", "trained_tokens")
# Discounted sums over judged groups; `settled` and `tokens` over trained or dropped ones.
_RECENT = ("judged", "groups", "rollouts", "cost", "passed", "score", "spread", "settled", "tokens")


class Tracks:
    """Counters and discounted means, a row per domain."""

    def __init__(self, num_rows: int) -> None:
        """Nothing seen yet."""
        self.rows = Columns(num_rows, dict.fromkeys((*_TOTALS, *_RECENT, "false_pass"), 0.0))

    def judged(
        self,
        row: int,
        *,
        num_scored: int,
        cost: float,
        pass_rate: float,
        mean_score: float,
        spread: float,
        rehearsed: bool = False,
    ) -> None:
        """One group came back; a rehearsal, or one without scored rollouts, only cost something."""
        rows, ok = self.rows, float(num_scored > 0 and not rehearsed)
        rows["num_rollouts"][row] += num_scored
        rows["total_cost"][row] += cost
        for name, value in (
            ("judged", 1.0),
            ("groups", ok),
            ("rollouts", num_scored),
            ("cost", cost),
            ("passed", pass_rate * ok),
            ("score", mean_score * ok),
            ("spread", spread * ok),
        ):
            column = rows[name]
            # A failed group says nothing about how a domain goes, so it makes no memory fade.
            keep = _RATE_DISCOUNT if ok or name in ("judged", "rollouts", "cost") else 1.0
            column[row] = column[row] * keep + value

    def judged_many(
        self,
        *,
        num_groups_D: Floats,
        num_scored_D: Floats,
        cost_D: Floats,
        pass_rate_D: Floats,
        spread_D: Floats,
    ) -> None:
        """A step's groups at once; `spread_D` is their sum."""
        rows = self.rows
        rows["num_rollouts"] += num_scored_D
        rows["total_cost"] += cost_D
        keep = _RATE_DISCOUNT**num_groups_D
        good_D = np.where(num_scored_D > 0, num_groups_D, 0.0)
        keep_good = _RATE_DISCOUNT**good_D
        # Groups of one step count as equally old.
        for name, value, kept in (
            ("judged", num_groups_D, keep),
            ("rollouts", num_scored_D, keep),
            ("cost", cost_D, keep),
            ("groups", good_D, keep_good),
            ("passed", pass_rate_D * good_D, keep_good),
            ("score", pass_rate_D * good_D, keep_good),
            ("spread", spread_D, keep_good),
        ):
            rows[name] = rows[name] * kept + value

    def settled(self, row: int, tokens: float) -> None:
        """A group was trained on so many tokens, or dropped with none."""
        for name, value in (("settled", 1.0), ("tokens", tokens)):
            column = self.rows[name]
            column[row] = column[row] * _RATE_DISCOUNT + value
        self.rows["trained_tokens"][row] += tokens

    def settled_many(self, num_groups_D: Floats, tokens_D: Floats) -> None:
        """A step's groups at once."""
        keep = _RATE_DISCOUNT**num_groups_D
        self.rows["settled"] = self.rows["settled"] * keep + num_groups_D
        self.rows["tokens"] = self.rows["tokens"] * keep + tokens_D
        self.rows["trained_tokens"] += tokens_D

    def learnability(self) -> Floats:
        """Mean spread of scores in a group, 0 to 1; one optimistic group stands in for no data.

        For pass/fail this is the mean of 2 * sqrt(p * (1 - p)): nothing is learned from groups
        that all pass or all fail.
        """
        learnability: Floats = (self.rows["spread"] + 1.0) / (self.rows["groups"] + 1.0)
        return learnability

    def cost_per_rollout(self) -> Floats:
        """Recent cost per scored rollout; the mean of the others where nothing was observed."""
        # One rollout more than was scored: a domain in which all fail is dear, not priceless.
        unscored = self.rows["rollouts"] < 1.0
        rollouts = np.where(unscored & (self.rows["cost"] > 0), 1.0, self.rows["rollouts"])
        return _means_or_typical(self.rows["cost"], rollouts)

    def prices(self) -> Prices:
        """Recent cost and trained tokens per group."""
        cost = _means_or_typical(self.rows["cost"], self.rows["judged"])
        tokens = _means_or_typical(self.rows["tokens"], self.rows["settled"])
        return Prices(cost, np.maximum(tokens, _MIN_TRAINED_RATIO * tokens.mean()))

    def mean(self, row: int, name: str) -> float | None:
        """Recent mean per scored group, None before the first."""
        groups = self.rows["groups"][row]
        return float(self.rows[name][row] / groups) if groups else None


def _means_or_typical(totals: Floats, counts: Floats) -> Floats:
    known = totals > _MIN_COST * counts
    means = totals / np.where(known, counts, 1.0)
    typical = float(means[known].mean()) if known.any() else 1.0
    return np.where(known, means, typical)
