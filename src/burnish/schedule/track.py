"""What is known about one domain: where its indices stand, how it goes, what it costs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from burnish.schedule.slope import DiscountedSlope

# Discount per observed group of the regression: remembers about 200 groups, the scale on which a
# pass rate moves visibly.
_SLOPE_DISCOUNT = 0.995
# Discount per observed group of rates and costs: about 33 groups, so that a domain that starts or
# stops carrying signal is noticed within a few steps.
_RATE_DISCOUNT = 0.97


class DomainTrack:
    """Counters and discounted means of one domain; `state()` holds every field."""

    def __init__(self) -> None:
        """Nothing seen yet."""
        self.next_index = 0
        self.num_floor_picks = 0
        self.wait_picks = 0
        self.quarantined: str | None = None
        self.smoothed_share: float | None = None
        self.line = DiscountedSlope()
        self.num_rollouts = 0
        self.total_cost = 0.0
        # Discounted sums over observed groups.
        self.groups = 0.0
        self.rollouts = 0.0
        self.cost = 0.0
        self.passed = 0.0
        self.score = 0.0
        self.spread = 0.0

    def add(
        self,
        *,
        pass_rate: float,
        mean_score: float,
        score_std: float,
        num_rollouts: int,
        cost: float,
    ) -> None:
        """Take one judged group."""
        self.num_rollouts += num_rollouts
        self.total_cost += cost
        self.line.add(float(self.num_rollouts), pass_rate, _SLOPE_DISCOUNT)
        self.groups = self.groups * _RATE_DISCOUNT + 1.0
        self.rollouts = self.rollouts * _RATE_DISCOUNT + num_rollouts
        self.cost = self.cost * _RATE_DISCOUNT + cost
        self.passed = self.passed * _RATE_DISCOUNT + pass_rate
        self.score = self.score * _RATE_DISCOUNT + mean_score
        # The spread of a fair coin, 0.5, is the most that scores in [0, 1] can have.
        self.spread = self.spread * _RATE_DISCOUNT + min(2.0 * score_std, 1.0)

    def learnability(self) -> float:
        """Mean spread of scores in a group, 0 to 1; one optimistic group stands in for no data.

        For pass/fail this is the mean of 2 * sqrt(p * (1 - p)): nothing is learned from groups
        that all pass or all fail.
        """
        return (self.spread + 1.0) / (self.groups + 1.0)

    def state(self) -> dict[str, Any]:
        """All fields as JSON values."""
        return {**vars(self), "line": self.line.state()}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> DomainTrack:
        """Rebuild exactly."""
        track = cls()
        assert vars(track).keys() == state.keys()
        vars(track).update(state)
        track.line = DiscountedSlope.from_state(state["line"])
        return track
