"""One circuit breaker: Page's sequential test on failures, and the pause that follows.

    S <- max(0, S + log(likelihood of the attempt if broken / if healthy)); open when S >= threshold

Page's test (1954) reacts fastest among all tests with the same rate of false alarms (Lorden 1971).
A window with a minimum count needs several times the failures for the same certainty: a Beta(1, 9)
posterior of the failure rate opens after 16 failures in a row where this opens after four.
"""

from __future__ import annotations

import math
from typing import Any

from burnish.schedule.breakers.base import BreakerConfig, BreakerState

# Where other tasks come through, one alone may bring this part of the evidence: a poisoned item is
# the item's fault, not its domain's. Two of them together are the domain's.
_ONE_TASK = 0.75
# Tasks whose evidence is remembered between two clean attempts; a run has few in flight.
_MAX_TASKS = 64


class Circuit:
    """State of one breaker. Times are the caller's."""

    def __init__(self, config: BreakerConfig) -> None:
        """Closed."""
        self._config = config
        self._by_task: dict[str, float] = {}
        self.evidence = 0.0
        self.is_open = False
        self.opened_s = 0.0
        self.cooldown_s = 0.0
        self.probe_s: float | None = None
        self.clean_probes = 0
        self.num_failures = 0
        self.num_opened = 0

    def state(self, now_s: float) -> BreakerState:
        """What it lets through at that time."""
        if not self.is_open:
            return BreakerState.CLOSED
        cooled = now_s >= self.opened_s + self.cooldown_s
        return BreakerState.HALF_OPEN if cooled else BreakerState.OPEN

    def refuses(self, now_s: float) -> bool:
        """Whether a group would be turned away."""
        state = self.state(now_s)
        if state is not BreakerState.HALF_OPEN:
            return state is BreakerState.OPEN
        # A probe that never reported back is given up after another cool-down.
        return self.probe_s is not None and now_s < self.probe_s + self.cooldown_s

    def clean(self, task: str) -> None:
        """An attempt was judged."""
        c = self._config
        if self.is_open:
            return
        step = math.log((1.0 - c.broken_ratio) / (1.0 - c.healthy_ratio))
        self.evidence = max(self.evidence + step, 0.0)
        if task in self._by_task:
            self._by_task[task] += step
            if self._by_task[task] <= 0.0:
                del self._by_task[task]

    def failed(self, task: str, now_s: float, *, weight: float, others_answer: bool) -> bool:
        """An attempt failed in this breaker's way; True if that opened it.

        Args:
            task: whose attempt.
            now_s: the time.
            weight: how much it says, relative to a failure by chance.
            others_answer: other tasks came through of late, so this one may be poisoned.
        """
        c = self._config
        self.num_failures += 1
        if self.is_open:
            return self.probe_failed(now_s)
        step = weight * math.log(c.broken_ratio / c.healthy_ratio)
        before = self._by_task.get(task, 0.0)
        if others_answer:
            step = min(step, max(_ONE_TASK * c.threshold - before, 0.0))
        self._by_task[task] = before + step
        if len(self._by_task) > _MAX_TASKS:
            del self._by_task[next(iter(self._by_task))]
        self.evidence = min(self.evidence + step, c.threshold)
        if self.evidence < c.threshold:
            return False
        self._open(now_s, c.cooldown_s)
        return True

    def task_is_to_blame(self, task: str) -> bool:
        """Whether one task has brought all the evidence that it may."""
        return self._by_task.get(task, 0.0) >= _ONE_TASK * self._config.threshold

    def probe_failed(self, now_s: float) -> bool:
        """While half-open: pause again, for longer. True if it was a probe."""
        if self.state(now_s) is not BreakerState.HALF_OPEN:
            return False
        self._open(now_s, min(2.0 * self.cooldown_s, self._config.max_cooldown_s))
        return True

    def probe_passed(self) -> None:
        """While half-open: a whole group came back clean."""
        if not self.is_open or self.probe_s is None:
            return
        self.probe_s = None
        self.clean_probes += 1
        if self.clean_probes >= self._config.probes_to_close:
            self.is_open = False
            self.evidence, self.cooldown_s = 0.0, 0.0
            self._by_task.clear()

    def _open(self, now_s: float, cooldown_s: float) -> None:
        self.is_open = True
        self.opened_s, self.cooldown_s = now_s, cooldown_s
        self.probe_s, self.clean_probes = None, 0
        self.num_opened += 1

    def saved(self, now_s: float) -> dict[str, Any]:
        """All that `load` needs. Times become ages: clocks differ after a restart."""
        kept = ("evidence", "is_open", "cooldown_s", "num_failures", "num_opened")
        values: dict[str, Any] = {name: getattr(self, name) for name in kept}
        return values | {
            "age_s": now_s - self.opened_s,
            "clean_probes": self.clean_probes,
            "by_task": dict(self._by_task),
        }

    def load(self, saved: dict[str, Any], now_s: float) -> None:
        """Go on from `saved`. A probe under way did not survive; the next one starts at once."""
        values = dict(saved)
        self.opened_s = now_s - values.pop("age_s")
        self._by_task = values.pop("by_task")
        for name, value in values.items():
            setattr(self, name, value)
