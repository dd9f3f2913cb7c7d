"""Jobs: what one asks for, where it stands, and what the scheduler wants done."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from pydantic import Field

from burnish.core.config import Config
from burnish.core.records import Record


class JobState(StrEnum):
    """Where a job is."""

    QUEUED = "queued"
    """It waits, for the first time or after it gave way."""
    RUNNING = "running"
    """It holds its units."""
    STOPPING = "stopping"
    """It was asked to save a checkpoint and end; it still holds its units."""
    DONE = "done"
    """It ended well."""
    FAILED = "failed"
    """It ended with an error."""
    CANCELLED = "cancelled"
    """Somebody gave it up."""


OVER = frozenset({JobState.DONE, JobState.FAILED, JobState.CANCELLED})
"""States that are final."""


class JobSpec(Record, frozen=True, kw_only=True):
    """What somebody wants run."""

    job_id: str
    """Unique."""
    tenant: str
    """On whose account."""
    units: int
    """Cores or accelerators, all at once or none (a gang)."""
    priority: int = 0
    """Higher goes first, and may take the place of lower."""


class JobRow(Record, frozen=True, kw_only=True):
    """A job as it is listed."""

    spec: JobSpec
    """What was asked for."""
    state: JobState
    """Where it is."""
    is_guest: bool
    """Whether it runs on units that another job lends."""
    lent: int
    """Units that it lends to others now."""
    num_starts: int
    """Times it was started; one more than it gave way."""


class JobsConfig(Config):
    """How a machine is shared."""

    units: int = Field(default=2, ge=1)
    """All there is."""
    quotas: dict[str, int] = Field(default_factory=dict)
    """Units that a tenant gets back from those beyond theirs; 0 for tenants not named."""
    half_life_s: float = Field(default=86_400.0, gt=0.0, allow_inf_nan=False)
    """After which use counts half against a tenant."""
    ageing_s: float = Field(default=3600.0, gt=0.0, allow_inf_nan=False)
    """Waiting that is worth one level of priority in the queue (not for taking places)."""
    lend_after_s: float = Field(default=60.0, ge=0.0, allow_inf_nan=False)
    """Seconds for which a job must not have needed units before it lends them; 0 never lends."""
    entry_s: float = Field(default=60.0, ge=0.0, allow_inf_nan=False)
    """Seconds charged at the start: many short jobs must not slip in before use is measured."""


class ActionKind(StrEnum):
    """What is to be done."""

    START = "start"
    """Start it, or resume it from its checkpoint."""
    PREEMPT = "preempt"
    """Ask it to save a checkpoint and end."""


class Action(NamedTuple):
    """One thing to do; report back with `ended`."""

    kind: ActionKind
    """What."""
    job_id: str
    """To whom."""
