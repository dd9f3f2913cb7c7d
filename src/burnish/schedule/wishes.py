"""What is declared about domains: priorities, bounds, and whether they can be met together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from burnish.core.errors import UserError
from burnish.schedule.picks import CostUnit, DomainScheduleConfig, DomainShare
from burnish.schedule.values.columns import Floats
from burnish.schedule.values.names import PolicyName

NO_WISH = DomainShare()
_ROUNDING = 1e-9


class Wishes(NamedTuple):
    """Declared shares as arrays."""

    weight_D: Floats
    """Priorities."""
    low_D: Floats
    """Least share of what lies above the floor."""
    high_D: Floats
    """Greatest share of the same."""


def wishes_above_floor(shares: Sequence[DomainShare], floor: float) -> Wishes:
    """Bounds on the whole budget, less what the floor gives anyway."""
    weight = np.array([s.weight for s in shares], dtype=np.float64)
    low = np.array([s.min_share for s in shares], dtype=np.float64)
    high = np.array([s.max_share for s in shares], dtype=np.float64)
    if floor >= 1.0:
        return Wishes(weight, np.zeros_like(low), np.ones_like(high))
    protected = floor * weight / weight.sum()
    low = np.maximum(low - protected, 0.0) / (1.0 - floor)
    high = np.minimum(np.maximum(high - protected, 0.0) / (1.0 - floor), 1.0)
    return Wishes(weight, low, high)


def check_schedule(domains: Sequence[str], config: DomainScheduleConfig) -> None:
    """Refuse a mix that no scheduler can serve; for dry runs, before anything is loaded.

    Raises:
        UserError: no domain, wishes for a domain that is not trained, or shares that cannot be
            met together.
    """
    if not domains:
        raise UserError("No domain to schedule.", fix="name at least one under `envs`.")
    assert len(set(domains)) == len(domains), "duplicate domain"
    unknown = sorted(set(config.domains) - set(domains))
    if unknown:
        raise UserError(
            f"schedule.domains names {unknown[0]!r}, which this run does not train.",
            fix=f"use one of {', '.join(sorted(domains))}.",
        )
    check_wishes({n: config.domains.get(n, NO_WISH) for n in domains}, config.floor)


def check_live(config: DomainScheduleConfig, *, deterministic: bool) -> None:
    """Refuse what a run cannot do, though a simulation can.

    Raises:
        UserError: the rule needs what no run measures, or costs of a run that promises equal bits
            depend on the wall clock.
    """
    if config.policy is PolicyName.TAC:
        raise UserError(
            'schedule.policy = "tac" needs the alignment of gradients, which runs do not measure.',
            fix='use schedule.policy = "value"; `burnish simulate` compares both.',
        )
    if deterministic and config.cost_unit is not CostUnit.TOKENS:
        raise UserError(
            f'schedule.cost_unit = "{config.cost_unit}" depends on the wall clock.',
            fix='set schedule.cost_unit = "tokens", or run.deterministic = false.',
        )


def check_wishes(wishes: Mapping[str, DomainShare], floor: float) -> None:
    """Refuse shares that cannot be met together.

    Raises:
        UserError: naming the first that stands in the way.
    """
    total = sum(w.weight for w in wishes.values())
    floors = {name: floor * wish.weight / total for name, wish in wishes.items()}
    least = sum(w.min_share for w in wishes.values())
    # What the others get in any case cannot be given away as well.
    others = sum(floors[name] for name, w in wishes.items() if w.min_share < floors[name])
    beyond = sum(max(w.min_share, floors[name]) for name, w in wishes.items()) > 1.0 + _ROUNDING
    if beyond:
        left = f", which leaves less than the floors of the others, {others:.2g}" if others else ""
        raise UserError(
            f"The min_share values under schedule.domains sum to {least:g}{left}.",
            fix=f"lower them until they sum to at most {1.0 - others:.3g}.",
        )
    if sum(w.max_share for w in wishes.values()) < 1.0 - _ROUNDING:
        raise UserError(
            "The max_share values under schedule.domains sum to less than 1.",
            fix="raise one of them, or remove it.",
        )
    for name, wish in wishes.items():
        protected = floors[name]
        if wish.max_share < max(wish.min_share, protected):
            raise UserError(
                f"schedule.domains.{name}.max_share = {wish.max_share:g} lies below its min_share "
                f"or its protected floor of {protected:g}.",
                fix="raise max_share, or lower schedule.floor.",
            )
