"""How many requests an engine should hold: additive increase, multiplicative decrease on its load.

Agents spend most of their life outside the engine. A bound on episodes in flight therefore leaves
slots empty when many are away, and floods the queue when they all come back. What is bounded here
is the load itself: the requests that the engine has, plus those that are about to come.

    target += step            while requests find a slot at once        (probe for more)
    target *= decrease        on preemption, full cache, or a slow queue (back off)

AIMD is what lets independent controllers on shared engines converge to equal parts (Chiu and Jain
1989).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from pydantic import Field

from burnish.core.config import Config


class EngineLoad(NamedTuple):
    """What an engine, or a fleet of them, is doing now."""

    num_slots: int
    """Sequences that can be decoded together."""
    num_running: int
    """Of these, in use."""
    num_waiting: int
    """Requests that wait for a slot."""
    kv_ratio: float
    """Part of the key/value cache that is in use, in [0, 1]."""
    num_preemptions: int
    """Since the start."""
    queue_s: float
    """How long the request at the head of the queue has waited; 0.0 without one."""


class LoadConfig(Config):
    """How full to keep the engines."""

    target_ratio: float = Field(default=1.0, gt=0.0, le=2.0, allow_inf_nan=False)
    """Requests per slot to begin with."""
    min_ratio: float = Field(default=0.25, gt=0.0, le=1.0, allow_inf_nan=False)
    """Backing off ends here."""
    max_ratio: float = Field(default=1.0, gt=0.0, le=4.0, allow_inf_nan=False)
    """Probing ends here. More than 1 always has requests waiting: in simulation 1.05 filled no more
    slots than 1.0 and made the 99th percentile of the wait three seconds instead of one."""
    step_ratio: float = Field(default=0.01, gt=0.0, le=1.0, allow_inf_nan=False)
    """Increase per decision interval."""
    decrease: float = Field(default=0.95, gt=0.0, lt=1.0, allow_inf_nan=False)
    """Factor of a decrease."""
    interval_s: float = Field(default=2.0, gt=0.0, allow_inf_nan=False)
    """Between two changes: an effect must be seen before it is judged."""
    max_kv_ratio: float = Field(default=0.9, gt=0.0, le=1.0, allow_inf_nan=False)
    """Fuller caches preempt."""
    max_queue_s: float = Field(default=1.0, gt=0.0, allow_inf_nan=False)
    """Longer waits mean that the slots, not the agents, are short."""


class LoadControl:
    """Says how many episodes may start; pure, time comes with the call."""

    def __init__(self, config: LoadConfig) -> None:
        """Begin at the configured target."""
        self._config = config
        self._ratio = min(max(config.target_ratio, config.min_ratio), config.max_ratio)
        self._changed_s: float | None = None
        self._preemptions = 0
        self.num_decreases = 0

    @property
    def target_ratio(self) -> float:
        """Requests per slot that it aims at now."""
        return self._ratio

    def room(self, load: EngineLoad, num_coming: int, now_s: float) -> int:
        """Episodes that may start now.

        Args:
            load: of the engines.
            num_coming: episodes admitted that have not asked the engine yet.
            now_s: the time.
        """
        self._adapt(load, now_s)
        wanted = math.floor(self._ratio * load.num_slots)
        return max(wanted - load.num_running - load.num_waiting - num_coming, 0)

    def state(self) -> list[float]:
        """All that `load` needs; times are not kept, the next decision is free."""
        return [self._ratio, self.num_decreases]

    def load(self, state: Any) -> None:
        """Go on from `state`."""
        self._ratio, self.num_decreases = float(state[0]), int(state[1])

    def _adapt(self, load: EngineLoad, now_s: float) -> None:
        c = self._config
        if self._changed_s is None:
            self._changed_s, self._preemptions = now_s, load.num_preemptions
            return
        if now_s < self._changed_s + c.interval_s:
            return
        preempted = load.num_preemptions > self._preemptions
        self._changed_s, self._preemptions = now_s, load.num_preemptions
        if preempted or load.kv_ratio > c.max_kv_ratio or load.queue_s > c.max_queue_s:
            self._ratio = max(self._ratio * c.decrease, c.min_ratio)
            self.num_decreases += 1
        elif load.num_waiting == 0:
            self._ratio = min(self._ratio + c.step_ratio, c.max_ratio)
