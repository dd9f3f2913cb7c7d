"""Policies by name."""

from __future__ import annotations

from collections.abc import Callable

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
from burnish.schedule.values.names import PolicyName
from burnish.schedule.values.vpcf import ValuePerCost

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
