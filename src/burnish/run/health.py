"""What the loop learns about its domains beside their scores: faults and lengths."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from burnish.core.records import Failure, Group
from burnish.core.vocabulary import FailureKind
from burnish.schedule.length_audit import LengthAudit, LengthAuditConfig, LengthBias

# Failures of an environment's own making: repeated, they shut it out for good.
_OWN_FAULTS = frozenset({FailureKind.ENVIRONMENT, FailureKind.VERIFIER, FailureKind.DATA})


class Health:
    """Pure bookkeeping; the loop acts on it."""

    def __init__(
        self,
        *,
        failures_to_quarantine: int,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        """Start empty, or go on from `state`.

        Args:
            failures_to_quarantine: own faults of an environment after which it is shut out.
            state: of a checkpoint.
        """
        self._limit = failures_to_quarantine
        config = LengthAuditConfig()
        self._faults: dict[str, int] = dict(state["faults"]) if state else {}
        self._last_fault: dict[str, Failure] = {}
        self._lengths = (
            LengthAudit.from_state(state["lengths"], config) if state else LengthAudit(config)
        )

    def judged(self, group: Group) -> None:
        """All rollouts of a group came back, well or badly."""
        for rollout in group.rollouts:
            failure = rollout.verdict.failure
            if failure is None:
                self._lengths.completed(group.domain, rollout.num_sampled_tokens)
            elif failure.kind in _OWN_FAULTS:
                self._faults[group.domain] = self._faults.get(group.domain, 0) + 1
                self._last_fault[group.domain] = failure

    def excluded(self, group: Group) -> None:
        """A judged group was dropped for its content."""
        for rollout in group.rollouts:
            if rollout.verdict.failure is None:
                self._lengths.excluded(group.domain, rollout.num_sampled_tokens)

    def trained(self, group: Group) -> None:
        """A judged group went into a batch."""
        for rollout in group.rollouts:
            if rollout.verdict.failure is None:
                self._lengths.trained(group.domain, rollout.num_sampled_tokens)

    def unfit(self) -> dict[str, Failure]:
        """Domains whose environment failed too often by its own fault, with the last failure."""
        return {d: f for d, f in self._last_fault.items() if self._faults[d] >= self._limit}

    def length_bias(self) -> LengthBias:
        """Trained against trainable lengths over all domains (invariant 6)."""
        return self._lengths.report()[0]

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds."""
        return {"faults": dict(self._faults), "lengths": self._lengths.state()}
