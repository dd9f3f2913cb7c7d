"""Scenarios by name. A simulator joins by one line here and a `SCENARIOS` in its module."""

from __future__ import annotations

from importlib import import_module

from burnish.core.errors import UserError
from burnish.plan.scenario import Scenario

_MODULES = ("burnish.plan.learning.families", "burnish.plan.pipeline.families")


def scenarios() -> dict[str, Scenario]:
    """All of them."""
    found: dict[str, Scenario] = {}
    for module in _MODULES:
        for scenario in import_module(module).SCENARIOS:
            found[scenario.name] = scenario
    return found


def scenario(name: str) -> Scenario:
    """The one of this name.

    Raises:
        UserError: if there is none.
    """
    known = scenarios()
    if name not in known:
        raise UserError(f"There is no scenario {name!r}.", fix=f"use one of {', '.join(known)}.")
    return known[name]
