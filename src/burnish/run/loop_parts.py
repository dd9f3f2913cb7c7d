"""What the loop is given: its settings, and everything that it drives."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import NamedTuple

from burnish.core.protocols import Environment
from burnish.rollout.collect.collector import Collector, Sampling
from burnish.run.control.roster import Roster
from burnish.run.flow import FlowControl
from burnish.run.health import Health
from burnish.run.intake import Intake
from burnish.run.publish import Publisher
from burnish.run.step_report import StepReporter
from burnish.run.training import PolicyTrainer
from burnish.schedule.admission import Admission
from burnish.schedule.domains import DomainScheduler
from burnish.store.run_directory import RunDirectory
from burnish.train.advantages import Normaliser, RunningScale


class LoopConfig(NamedTuple):
    """What the loop itself needs to know."""

    num_steps: int
    """Training steps of the whole run."""
    group_size: int
    """Samples of one task on average."""
    sampling: Sampling
    """How tokens are drawn."""
    seed: int
    """Root of all randomness."""
    deterministic: bool
    """Decide in dispatch order only."""
    checkpoint_every_steps: int
    """How often the run can be gone on with."""
    normaliser: Normaliser
    """What advantages are divided by."""


class LoopParts(NamedTuple):
    """Everything that the loop drives; none of it knows the loop."""

    environments: MutableMapping[str, Environment]
    roster: Roster
    scheduler: DomainScheduler
    intake: Intake
    admission: Admission
    scale: RunningScale
    health: Health
    flow: FlowControl | None
    collector: Collector
    trainer: PolicyTrainer
    publisher: Publisher
    directory: RunDirectory
    reporter: StepReporter
