"""The contract of a simulated scenario: what `burnish simulate` knows about it."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import NamedTuple, Protocol


class Tier(StrEnum):
    """How large."""

    S = "s"
    """Seconds: 50 domains."""
    M = "m"
    """Minutes: 300 domains, 1,024 accelerators."""
    L = "l"
    """1,000 domains, 8,192 accelerators."""


class Curve(NamedTuple):
    """One quantity over the simulated time."""

    name: str
    """What it is."""
    x_label: str
    """What it is drawn over."""
    points: tuple[tuple[float, float], ...]
    """(x, y)."""


class Trial(NamedTuple):
    """One policy on one seed."""

    metrics: Mapping[str, float]
    """By name; the first is what policies are ranked by."""
    curves: tuple[Curve, ...]
    """To draw."""


class Scenario(Protocol):
    """Something that policies can be compared on."""

    @property
    def name(self) -> str:
        """`[a-z][a-z0-9_]*`."""
        ...

    @property
    def summary(self) -> str:
        """One line for people."""
        ...

    def policies(self) -> tuple[str, ...]:
        """Names that `run` takes; the first is the default of the real run."""
        ...

    def run(self, policy: str, tier: Tier, seed: int) -> Trial:
        """Simulate. Equal arguments give equal trials, in any process."""
        ...
