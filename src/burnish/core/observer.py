"""What a run tells whoever watches it: a terminal, a test, a JSON client, or nobody."""

from enum import StrEnum
from pathlib import Path
from typing import Protocol

import msgspec

from burnish.core.records import Failure, Record


class RunPhase(StrEnum):
    """The parts of a run, in order. A run may skip some."""

    LOAD = "load"
    """Weights are read and the engine is built."""
    CHECK = "check"
    """Environments are audited before they may teach."""
    EVAL_BEFORE = "eval_before"
    """Held-out pass rate of the base model."""
    WARM_UP = "warm_up"
    """Supervised steps on reference solutions."""
    EVAL_WARMED = "eval_warmed"
    """Held-out pass rate after the warm-up."""
    TRAIN = "train"
    """Reinforcement learning."""
    EVAL_AFTER = "eval_after"
    """Held-out pass rate at the end."""
    REPORT = "report"
    """Checkpoint, report and result are written."""


class StepView(Record, frozen=True, kw_only=True):
    """One finished training step, as a person wants to see it."""

    phase: RunPhase
    """`warm_up` or `train`."""
    step: int
    """1-based number of the step that just ended."""
    num_steps: int
    """Steps planned for this phase."""
    reward: dict[str, float] = msgspec.field(default_factory=dict)
    """Mean score of the scored rollouts per domain; a domain without any is absent."""
    pass_rate: dict[str, float] = msgspec.field(default_factory=dict)
    """Pass rate of the scored rollouts per domain; a domain without any is absent."""
    engine_tokens_per_s: float = 0.0
    """Tokens sampled per wall second since the previous step."""
    trainer_tokens_per_s: float = 0.0
    """Tokens trained on per wall second since the previous step, shared prompts counted once."""
    lag: float = 0.0
    """Mean age of the trained tokens in weight versions."""
    failures: int = 0
    """Classified failures so far, those of the policy left out."""
    dropped: int = 0
    """Rollouts dropped so far, for whatever reason."""
    eta_s: float | None = None
    """Seconds until the run ends, if it can be told."""


class RunObserver(Protocol):
    """Watches a run. Calls come from one thread at a time, must return at once and never raise."""

    def phase(self, name: RunPhase, total: int) -> None:
        """A phase begins with `total` units of work, 0 if unknown."""
        ...

    def progress(self, done: int) -> None:
        """`done` units of the current phase are finished, counted from its start."""
        ...

    def step(self, view: StepView) -> None:
        """A training step ended."""
        ...

    def failure(self, failure: Failure) -> None:
        """Something was classified as a failure and counted."""
        ...

    def note(self, text: str) -> None:
        """One line worth reading: a quarantine, a warning, a path."""
        ...

    def result(self, path: Path) -> None:
        """The run ended and `path`, a run directory, is complete."""
        ...


class SilentObserver:
    """Watches nothing: for tests, and for callers that only want the result."""

    def phase(self, name: RunPhase, total: int) -> None:
        """Ignore it."""

    def progress(self, done: int) -> None:
        """Ignore it."""

    def step(self, view: StepView) -> None:
        """Ignore it."""

    def failure(self, failure: Failure) -> None:
        """Ignore it."""

    def note(self, text: str) -> None:
        """Ignore it."""

    def result(self, path: Path) -> None:
        """Ignore it."""
