"""What the domain scheduler is configured with, decides and reports."""

from __future__ import annotations

import math
from enum import StrEnum

from pydantic import Field

from burnish.core.config import Config
from burnish.core.records import Record
from burnish.schedule.curriculum.config import CurriculumConfig
from burnish.schedule.values.names import PolicyName


class CostUnit(StrEnum):
    """What a rollout's cost is counted in."""

    SECONDS = "seconds"
    """Accelerator-seconds: what really limits the run, but not reproducible."""
    DOMINANT = "dominant"
    """Seconds of engine, boxes or trainer, whichever a group takes the greatest part of: domains
    are fair to each other by what each uses most. Not reproducible."""
    TOKENS = "tokens"
    """Computed tokens: the same in every run with the same seed; deterministic mode needs it."""

    def of(self, **costs: float | None) -> float:
        """The one of `costs`, by unit, that counts."""
        cost = costs[self.value]
        assert cost is not None, f"cost in {self.value} is required"
        assert math.isfinite(cost)
        assert cost >= 0.0
        return cost


class PickReason(StrEnum):
    """Why a domain was chosen."""

    WARMUP = "warmup"
    """It has not yet been tried often enough to have a value."""
    FLOOR = "floor"
    """Its protected part was due, or it had waited too long."""
    VALUE = "value"
    """Its expected gain per cost earned it."""


class Pick(Record, frozen=True, kw_only=True):
    """One group to dispatch."""

    domain: str
    """Environment name."""
    index: int
    """How often it was picked before."""
    reason: PickReason
    """Why this domain."""


class DomainRow(Record, frozen=True, kw_only=True):
    """One line of the scheduler's report."""

    domain: str
    """Environment name."""
    quarantined: str | None
    """Reason, or None while active."""
    share: float
    """Target share of the budget, floor included; 0.0 in quarantine."""
    cost_ratio: float
    """Part of the observed cost that went to it."""
    pass_rate: float | None
    """Recent mean pass rate; None before the first observation."""
    mean_score: float | None
    """Recent mean score; None before the first observation."""
    learnability: float
    """Recent spread of scores inside groups, 0 (no gradient) to 1 (half pass)."""
    slope: float
    """Posterior gain in pass rate per rollout."""
    value: float
    """Optimistic gain per unit of cost, relative to the best active domain."""
    cost_per_rollout: float
    """Recent mean, in the configured unit."""
    num_picks: int
    """Groups dispatched."""
    num_floor_picks: int
    """Of these, by the floor."""
    wait_picks: int
    """Picks since it was last chosen."""
    max_gap_picks: int
    """Most picks that it can ever wait while it is eligible."""
    trained_tokens: float
    """Tokens of it that entered the loss."""

    @property
    def gain_per_cost(self) -> float:
        """Posterior gain in pass rate per unit of cost; 0.0 before a cost is known."""
        return self.slope / self.cost_per_rollout if self.cost_per_rollout else 0.0

    def brief(self) -> dict[str, float]:
        """What no metric holds, for the events of every step."""
        return {
            "cost_ratio": float(self.cost_ratio),
            "gain_per_cost": float(self.gain_per_cost),
            "wait_picks": self.wait_picks,
        }


class Explanation(Record, frozen=True, kw_only=True):
    """Why a domain has the share that it has."""

    domain: str
    """Environment name."""
    policy: str
    """The rule that decided."""
    unit: str
    """What it is a share of: cost, groups or tokens."""
    share: float
    """Part of the budget, floor included."""
    floor_share: float
    """Of this, what it gets whatever its value."""
    max_gap_picks: int
    """Most picks that it can wait."""
    terms: dict[str, float]
    """The policy's own reasons, by name."""
    text: str
    """All of it in one line."""


class DomainShare(Config):
    """Wishes for one domain."""

    weight: float = Field(default=1.0, gt=0.0, allow_inf_nan=False)
    """Multiplies both its value and its part of the floor; the ratio, under `static`."""
    min_share: float = Field(default=0.0, ge=0.0, le=1.0, allow_inf_nan=False)
    """Least share of the budget."""
    max_share: float = Field(default=1.0, gt=0.0, le=1.0, allow_inf_nan=False)
    """Greatest share of the budget."""


class DomainScheduleConfig(Config):
    """How compute is divided between domains."""

    policy: PolicyName = PolicyName.VALUE
    """The rule; `burnish simulate` compares them."""
    fairness: float = Field(default=0.0, ge=0.0, le=1.0, allow_inf_nan=False)
    """Under `value`: part of the shares that goes to domains that lag behind: that fail much and
    have practised little."""
    floor: float = Field(default=0.05, gt=0.0, le=1.0, allow_inf_nan=False)
    """Part of the budget dealt out evenly: how long a domain can wait goes with its inverse. In
    simulation 0.05 closed 1 to 2% more of the gap to an oracle than 0.1."""
    warmup_picks: int = Field(default=2, ge=0)
    """Groups that each domain gets before values count."""
    cost_unit: CostUnit = CostUnit.TOKENS
    """Which of the reported costs counts."""
    curriculum: CurriculumConfig = CurriculumConfig()
    """Which items within a domain."""
    domains: dict[str, DomainShare] = Field(default_factory=dict)
    """Wishes by domain; those not named get the defaults."""
