"""The contract of a policy: shares of the budget from what was observed, and nothing else.

Letters behind array names: D is a row per domain, K a column per band of difficulty.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, NamedTuple, Protocol

from burnish.schedule.values.columns import Bools, Floats

NUM_BANDS = 4
"""Bands of difficulty that pass rates are kept apart in; tiers, if there are more, share them."""


def band_of(tier: int, num_tiers: int) -> int:
    """The band of a tier, easiest first."""
    return tier * NUM_BANDS // max(num_tiers, NUM_BANDS)


class Unit(StrEnum):
    """What shares are shares of."""

    COST = "cost"
    """Accelerator-seconds, or the tokens computed in their place."""
    GROUPS = "groups"
    """Prompts: a domain with dear rollouts takes more of the machine."""
    TOKENS = "tokens"
    """Tokens that were really trained, after filters, staleness and failures."""


class StepOutcome(NamedTuple):
    """What one training step's groups showed."""

    attempted_DK: Floats
    """Rollouts started."""
    completed_DK: Floats
    """Of these, scored."""
    passed_DK: Floats
    """Of these, passed."""
    groups_D: Floats
    """Groups judged, of any tier."""
    spread_D: Floats
    """Sum over groups of the spread of scores, 0 (none) to 1 (half pass)."""
    cost_D: Floats
    """Cost of all attempts."""
    alignment_D: Floats
    """Cosine of the domain's gradient with that of all; 0 where nobody measures it."""


class View(NamedTuple):
    """What is known when shares are decided."""

    step: int
    """Training steps so far: the only clock."""
    active_D: Bools
    """Neither in quarantine nor removed."""
    weight_D: Floats
    """Declared priority, 1 by default."""
    low_D: Floats
    """Least share, of what the policy deals out."""
    high_D: Floats
    """Greatest share, of the same."""
    cost_D: Floats
    """Recent cost per scored rollout: failures make it dearer."""
    learnability_D: Floats
    """Recent mean spread of scores inside groups, 0 to 1."""
    false_pass_D: Floats
    """Audited part of passes that are undeserved."""
    pass_DK: Floats
    """Posterior pass rate of every tier."""
    size_D: Floats
    """Items that each domain has, for policies that go by size."""


class Policy(Protocol):
    """A rule for shares."""

    unit: Unit
    """What its shares are shares of."""
    protects: bool
    """Whether the floor's part of the budget is taken off before its shares apply."""

    def observe(self, outcome: StepOutcome) -> None:
        """Learn from a step."""
        ...

    def decide(self, view: View) -> Floats:
        """Shares: non-negative, 0 where inactive, summing to 1."""
        ...

    def explain(self, row: int) -> dict[str, float]:
        """The terms behind the last shares of a domain, by name."""
        ...

    def add_row(self) -> None:
        """A domain joined, behind the others."""
        ...

    def remove_row(self, row: int) -> None:
        """A domain left."""
        ...

    def state(self) -> dict[str, Any]:
        """All that `load` needs, as JSON values."""
        ...

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue exactly where `state` was taken."""
        ...
