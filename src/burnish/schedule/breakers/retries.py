"""Retry budgets: a few tries for one episode, and a small part of all attempts for the whole run.

Without the second bound an outage multiplies the load by the number of tries, at the worst moment.
A token bucket: every first attempt earns a part of a retry, every retry costs one.

A group that has used half of its lag gets no more retries: another try takes about as long as the
first, and when it comes too late the trainer stands still for it. In simulation that was a tenth of
the trainer's time. The group trains with the samples that it has.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field

from burnish.core.config import Config
from burnish.core.vocabulary import FailureKind

RETRIED = frozenset({FailureKind.INFRA, FailureKind.SANDBOX})
"""Kinds that say nothing about the task; others would only repeat themselves."""


# Part of the lag after which another try would end beyond it.
_LATE = 0.5


class RetryConfig(Config):
    """How often to try again."""

    max_attempts: int = Field(default=3, ge=1)
    """Tries for one episode."""
    budget_ratio: float = Field(default=0.1, ge=0.0, le=1.0, allow_inf_nan=False)
    """Retries per first attempt, over the whole run."""
    burst: int = Field(default=20, ge=1)
    """Retries saved up at most: a short outage may be ridden out."""


class RetryBudget:
    """Counts; knows no time."""

    def __init__(self, config: RetryConfig) -> None:
        """Start with the whole burst."""
        self._config = config
        self._tokens = float(config.burst)
        self.num_first = 0
        self.num_retries = 0
        self.num_refused = 0
        self.num_late = 0

    def started(self) -> None:
        """An episode begins its first attempt."""
        self.num_first += 1
        self._tokens = min(self._tokens + self._config.budget_ratio, float(self._config.burst))

    def may_retry(self, kind: FailureKind, attempts: int, used_lag: float = 0.0) -> bool:
        """Whether to try again; takes a token.

        Args:
            kind: of the last failure.
            attempts: failed ones of this episode.
            used_lag: part of the lag that its group has used, see `Admission.used_lag`.
        """
        if kind not in RETRIED or attempts >= self._config.max_attempts:
            return False
        if used_lag >= _LATE:
            self.num_late += 1
            return False
        if self._tokens < 1.0:
            self.num_refused += 1
            return False
        self._tokens -= 1.0
        self.num_retries += 1
        return True

    def state(self) -> list[float]:
        """All that `load` needs."""
        return [self._tokens, self.num_first, self.num_retries, self.num_refused]

    def load(self, state: Any) -> None:
        """Go on from `state`."""
        self._tokens = float(state[0])
        self.num_first, self.num_retries, self.num_refused = (int(v) for v in state[1:])
