"""Policies by name: what a configuration may ask for, without loading them."""

from __future__ import annotations

from enum import StrEnum


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
    """|advantage| times gradient alignment (arXiv 2606.25178); in simulations only."""
