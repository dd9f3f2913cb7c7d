"""Circuit breakers per (domain, kind of failure): stop feeding what is broken, probe, come back.

    closed --error budget spent--> open --cool-down over--> half-open --probe succeeds--> closed
                                     ^-------------------probe fails---'

Failures of the policy are the policy's business and count as successes of the machinery.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from pydantic import Field

from burnish.core.clock import Clock
from burnish.core.config import Config
from burnish.core.records import Record
from burnish.core.vocabulary import FailureKind
from burnish.schedule.state_version import require_version

STATE_VERSION = 1


class BreakerState(StrEnum):
    """What a breaker lets through."""

    CLOSED = "closed"
    """Everything."""
    OPEN = "open"
    """Nothing, until the cool-down is over."""
    HALF_OPEN = "half_open"
    """One probe at a time; its result decides."""


class BreakerConfig(Config):
    """When a breaker opens and for how long."""

    window_s: float = Field(default=120.0, gt=0.0, allow_inf_nan=False)
    """Attempts older than this no longer count."""
    min_failures: int = Field(default=5, ge=1)
    """Failures of one kind inside the window that it takes: fewer are bad luck."""
    failure_ratio: float = Field(default=0.5, gt=0.0, le=1.0, allow_inf_nan=False)
    """They must also be at least this part of the domain's attempts in the window."""
    cooldown_s: float = Field(default=30.0, gt=0.0, allow_inf_nan=False)
    """First pause; doubled whenever the probe fails."""
    max_cooldown_s: float = Field(default=600.0, gt=0.0, allow_inf_nan=False)
    """Longest pause."""


class BreakerRow(Record, frozen=True, kw_only=True):
    """One breaker that has seen a failure."""

    domain: str
    """Environment name."""
    kind: FailureKind
    """Kind of failure it counts."""
    state: BreakerState
    """What it lets through now."""
    num_failures: int
    """Failures since the start."""
    num_opened: int
    """Times it opened."""
    retry_in_s: float
    """Until the next probe; 0.0 unless open."""


class _Breaker:
    """State of one (domain, kind)."""

    def __init__(self) -> None:
        self.open = False
        self.opened_s = 0.0
        self.cooldown_s = 0.0
        self.probe_s: float | None = None
        self.num_failures = 0
        self.num_opened = 0


class Breakers:
    """All breakers of a run. Ask `allow` before a dispatch; report every end."""

    def __init__(self, config: BreakerConfig, clock: Clock) -> None:
        """All closed."""
        self._config = config
        self._clock = clock
        self._breakers: dict[tuple[str, FailureKind], _Breaker] = {}
        # Per domain: (time, kind of failure or None) of recent attempts.
        self._attempts: dict[str, deque[tuple[float, FailureKind | None]]] = {}

    def allow(self, domain: str) -> bool:
        """Whether to dispatch now. In half-open state a True takes the probe's place."""
        if domain in self.blocked():
            return False
        now = self._clock.now_s()
        for breaker in self._of(domain).values():
            if breaker.open:
                breaker.probe_s = now
        return True

    def blocked(self) -> frozenset[str]:
        """Domains that would be refused now; takes nothing."""
        now = self._clock.now_s()
        return frozenset(d for (d, _), b in self._breakers.items() if self._refuses(b, now))

    def success(self, domain: str) -> None:
        """An episode of `domain` was judged, well or badly."""
        self._note(domain, None)
        for breaker in self._of(domain).values():
            if breaker.open and breaker.probe_s is not None:
                breaker.open = False
                breaker.probe_s = None
                breaker.cooldown_s = 0.0
                self._attempts[domain].clear()

    def failure(self, domain: str, kind: FailureKind) -> None:
        """An episode of `domain` ended in a failure."""
        if kind is FailureKind.POLICY:
            self.success(domain)
            return
        self._note(domain, kind)
        breaker = self._breakers.setdefault((domain, kind), _Breaker())
        breaker.num_failures += 1
        now = self._clock.now_s()
        # A probe that failed in another way than expected is no sign of health either.
        for other in self._of(domain).values():
            if other.open and other.probe_s is not None:
                self._open(other, now)
        if not breaker.open and self._over_budget(domain, kind):
            self._open(breaker, now)

    def table(self) -> tuple[BreakerRow, ...]:
        """All breakers with a failure to their name."""
        now = self._clock.now_s()
        return tuple(
            BreakerRow(
                domain=domain,
                kind=kind,
                state=self._state_of(b, now),
                num_failures=b.num_failures,
                num_opened=b.num_opened,
                retry_in_s=max(b.opened_s + b.cooldown_s - now, 0.0) if b.open else 0.0,
            )
            for (domain, kind), b in self._breakers.items()
        )

    def state(self) -> dict[str, Any]:
        """All that `from_state` needs, as JSON values.

        Times are ages: clocks differ after a restart. Probes under way are not kept: they did not
        survive, and the next one starts at once.
        """
        now = self._clock.now_s()
        return {
            "version": STATE_VERSION,
            "breakers": [
                [
                    domain,
                    str(kind),
                    b.open,
                    now - b.opened_s,
                    b.cooldown_s,
                    b.num_failures,
                    b.num_opened,
                ]
                for (domain, kind), b in self._breakers.items()
            ],
            "attempts": {
                domain: [[now - t, None if kind is None else str(kind)] for t, kind in attempts]
                for domain, attempts in self._attempts.items()
            },
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any], config: BreakerConfig, clock: Clock) -> Breakers:
        """Continue where `state` was taken.

        Raises:
            UserError: if another version of the program wrote it.
        """
        require_version(state, STATE_VERSION, "breaker state")
        breakers, now = cls(config, clock), clock.now_s()
        for domain, kind, is_open, age_s, cooldown_s, num_failures, num_opened in state["breakers"]:
            b = breakers._breakers[domain, FailureKind(kind)] = _Breaker()
            b.open, b.opened_s, b.cooldown_s = is_open, now - age_s, cooldown_s
            b.num_failures, b.num_opened = num_failures, num_opened
        for domain, attempts in state["attempts"].items():
            breakers._attempts[domain] = deque(
                (now - age_s, None if kind is None else FailureKind(kind))
                for age_s, kind in attempts
            )
        return breakers

    def _of(self, domain: str) -> dict[FailureKind, _Breaker]:
        return {k: b for (d, k), b in self._breakers.items() if d == domain}

    def _state_of(self, breaker: _Breaker, now: float) -> BreakerState:
        if not breaker.open:
            return BreakerState.CLOSED
        cooled = now >= breaker.opened_s + breaker.cooldown_s
        return BreakerState.HALF_OPEN if cooled else BreakerState.OPEN

    def _refuses(self, breaker: _Breaker, now: float) -> bool:
        state = self._state_of(breaker, now)
        if state is not BreakerState.HALF_OPEN:
            return state is BreakerState.OPEN
        # A probe that never reported back is given up after another cool-down.
        return breaker.probe_s is not None and now < breaker.probe_s + breaker.cooldown_s

    def _open(self, breaker: _Breaker, now: float) -> None:
        doubled = 2.0 * breaker.cooldown_s if breaker.open else self._config.cooldown_s
        breaker.cooldown_s = min(doubled, self._config.max_cooldown_s)
        breaker.open = True
        breaker.opened_s = now
        breaker.probe_s = None
        breaker.num_opened += 1

    def _note(self, domain: str, kind: FailureKind | None) -> None:
        now = self._clock.now_s()
        attempts = self._attempts.setdefault(domain, deque())
        attempts.append((now, kind))
        while attempts[0][0] < now - self._config.window_s:
            attempts.popleft()

    def _over_budget(self, domain: str, kind: FailureKind) -> bool:
        attempts = self._attempts[domain]
        failures = sum(k is kind for _, k in attempts)
        return (
            failures >= self._config.min_failures
            and failures >= self._config.failure_ratio * len(attempts)
        )
