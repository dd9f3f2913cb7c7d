"""The words of the breakers: what they guard, how they are set, what they report."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from pydantic import Field

from burnish.core.config import Config
from burnish.core.records import Record
from burnish.core.vocabulary import FailureKind


class BreakerState(StrEnum):
    """What a breaker lets through."""

    CLOSED = "closed"
    """Everything."""
    OPEN = "open"
    """Nothing, until the cool-down is over."""
    HALF_OPEN = "half_open"
    """One group at a time; clean ones close it, a failure opens it again."""


class BreakerConfig(Config):
    """When a breaker opens and for how long."""

    healthy_ratio: float = Field(default=0.2, gt=0.0, lt=1.0, allow_inf_nan=False)
    """Failed attempts that need not alarm anybody."""
    broken_ratio: float = Field(default=0.8, gt=0.0, lt=1.0, allow_inf_nan=False)
    """Failed attempts of something that only burns time."""
    threshold: float = Field(default=5.5, gt=0.0, allow_inf_nan=False)
    """Evidence (nats of log-likelihood ratio) that opens it. With the ratios above a failure counts
    for 1.39 and a success against it as much: 5.5 is four failures more than successes."""
    cooldown_s: float = Field(default=30.0, gt=0.0, allow_inf_nan=False)
    """First pause; doubled whenever a probe fails."""
    max_cooldown_s: float = Field(default=1800.0, gt=0.0, allow_inf_nan=False)
    """Longest pause."""
    probe_samples: int = Field(default=2, ge=1)
    """Samples of a probe that go ahead; the others of its group follow when one comes through."""
    probes_to_close: int = Field(default=2, ge=1)
    """Clean groups that it takes to believe in a recovery."""


class BreakerKey(NamedTuple):
    """What one breaker guards."""

    domain: str
    """Environment name."""
    image: str
    """Box image that the task asks for; empty if none."""
    kind: FailureKind
    """Who is to blame."""


class Attempt(Record, frozen=True, kw_only=True):
    """One try of one episode, ended."""

    domain: str
    """Environment name."""
    task: str
    """Which item: attempts of one task fail together."""
    image: str = ""
    """Box image that it ran in; empty if none."""
    failure: FailureKind | None = None
    """None if it was judged."""


class Reaction(NamedTuple):
    """What an attempt's end set off."""

    opened: tuple[BreakerKey, ...] = ()
    """Breakers that opened: cancel what is queued behind them now, and give their quota away."""
    abandon: bool = False
    """The task itself is to blame: stop trying its other samples."""


NOTHING = Reaction()


class BreakerRow(Record, frozen=True, kw_only=True):
    """One breaker that has seen a failure."""

    domain: str
    """Environment name."""
    image: str
    """Box image; empty if none."""
    kind: FailureKind
    """Kind of failure it counts."""
    state: BreakerState
    """What it lets through now."""
    evidence: float
    """Nats in favour of broken, 0 to the threshold."""
    num_failures: int
    """Failures since the start."""
    num_opened: int
    """Times it opened."""
    retry_in_s: float
    """Until the next probe; 0.0 unless open."""
