"""Policies by name."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum

from burnish.schedule.values.bandits import Dump, MtGrpo, Sec, Tac, Tscl
from burnish.schedule.values.base import Policy
from burnish.schedule.values.fixed import (
    EqualCost,
    HardFirst,
    Proportional,
    RoundRobin,
    Static,
    Uniform,
)
from burnish.schedule.values.vpcf import ValuePerCost


class PolicyName(StrEnum):
    """Rules for shares."""

    VALUE = "value"
    """Expected gain per cost above a protected floor."""
    EQUAL_COST = "equal_cost"
    """Equal accelerator time, by weight."""
    STATIC = "static"
    """Ratios of the weights, held on trained tokens."""
    UNIFORM = "uniform"
    """Equal numbers of groups, by weight."""
    ROUND_ROBIN = "round_robin"
    """A tenth of the domains at a time."""
    PROPORTIONAL = "proportional"
    """As many groups as a domain has data for."""
    HARD_FIRST = "hard_first"
    """One minus the pass rate."""
    SEC = "sec"
    """Softmax of |advantage| (arXiv 2505.14970)."""
    DUMP = "dump"
    """Upper confidence bound on |advantage| (arXiv 2504.09710)."""
    TSCL = "tscl"
    """Size of the last change (arXiv 1707.00183)."""
    MT_GRPO = "mt_grpo"
    """Low and stagnant domains rise (arXiv 2602.05547)."""
    TAC = "tac"
    """|advantage| times gradient alignment (arXiv 2606.25178)."""


_RULES: dict[PolicyName, Callable[[int], Policy]] = {
    PolicyName.EQUAL_COST: EqualCost,
    PolicyName.STATIC: Static,
    PolicyName.UNIFORM: Uniform,
    PolicyName.ROUND_ROBIN: RoundRobin,
    PolicyName.PROPORTIONAL: Proportional,
    PolicyName.HARD_FIRST: HardFirst,
    PolicyName.SEC: Sec,
    PolicyName.DUMP: Dump,
    PolicyName.TSCL: Tscl,
    PolicyName.MT_GRPO: MtGrpo,
    PolicyName.TAC: Tac,
}


def make_policy(name: PolicyName, num_rows: int, *, fairness: float = 0.0) -> Policy:
    """A policy that has seen nothing yet."""
    if name is PolicyName.VALUE:
        return ValuePerCost(num_rows, fairness=fairness)
    return _RULES[name](num_rows)
