"""The flow control of a live run: how many groups start, who is urgent, what becomes of failures.

    loop --room?--> FlowControl <--attempt ended-- collector
      ^                  |
      '--opened, abandon-'--cases--> events, quality gate

All decisions are those of `schedule.flow` and `schedule.breakers`, which the simulator drives too.
In deterministic mode there is none of this: the clock would decide.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from burnish.core.boxes import SandboxPool
from burnish.core.clock import Clock
from burnish.core.records import Failure, Group, Task
from burnish.core.vocabulary import FailureKind
from burnish.run.group_pool import GroupPool
from burnish.run.hedging import BoxHedging
from burnish.run.probe_gate import ProbeGate
from burnish.schedule.breakers.base import Attempt, BreakerConfig, BreakerRow
from burnish.schedule.breakers.cases import BadCase, CaseQueue
from burnish.schedule.breakers.panel import Breakers
from burnish.schedule.breakers.retries import RETRIED, RetryBudget, RetryConfig
from burnish.schedule.flow.load import EngineLoad, LoadConfig, LoadControl
from burnish.schedule.flow.order import Lengths

# Levels of urgency between the shortest and the longest prediction: the engine ages requests by
# `ageing_steps` per level, so a few levels order a burst and starve nobody.
_LEVELS = 3
# A domain counts as long by its upper quartile: batches wait for the longest of a group.
_LONG = 0.75


class FlowSettings(NamedTuple):
    """What it is built from."""

    load: LoadConfig
    """How full the engine is kept."""
    breakers: BreakerConfig
    """When to pause a domain."""
    retries: RetryConfig
    """How often to try again."""


class FlowControl:
    """Wired between loop and collector; one event loop, no locks."""

    def __init__(
        self,
        settings: FlowSettings,
        clock: Clock,
        engine_load: Callable[[], EngineLoad] | None,
        digest_of: Callable[[str], str],
        used_lag: Callable[[str], float],
        hedging: BoxHedging | None = None,
    ) -> None:
        """Nothing has happened.

        Args:
            settings: see there.
            clock: for breakers, load and durations.
            engine_load: None where slots cannot be counted.
            digest_of: a domain's code and data, for those who mend it.
            used_lag: part of its lag that a group has used.
            hedging: of boxes; None asks for each of them once.
        """
        self._clock, self._engine_load, self._digest_of = clock, engine_load, digest_of
        self._used_lag = used_lag
        self._gate, self._num_first = ProbeGate(), settings.breakers.probe_samples
        self._load = LoadControl(settings.load)
        self._breakers = Breakers(settings.breakers, clock)
        self._retries = RetryBudget(settings.retries)
        self._lengths = Lengths()
        self._coming: dict[str, int] = {}
        self._box_s: dict[str, float] = {}
        self._hedging = hedging
        self.cases = CaseQueue()
        self.on_opened: Callable[[str, FailureKind], None] = lambda domain, kind: None
        self.on_abandon: Callable[[str], None] = lambda group_id: None
        self.on_room: Callable[[], None] = lambda: None

    # For the loop.

    def may_start(self, group_size: int) -> bool:
        """Whether the engine has room for one more group, or most of it."""
        if self._engine_load is None:
            return True
        coming = sum(self._coming.values())
        room = self._load.room(self._engine_load(), coming, self._clock.now_s())
        return 2 * room >= group_size

    def blocked(self) -> frozenset[str]:
        """Domains to pass over for now."""
        return self._breakers.blocked()

    def expected_tokens(self, domain: str) -> tuple[float, float]:
        """How long a domain's longer episodes are, and what is usual in the run."""
        return self._lengths.quantile(domain, _LONG), self._lengths.usual()

    def refuses(self, domain: str, task: Task) -> bool:
        """Whether this item's image is paused while its domain is not."""
        return self._breakers.refuses(domain, image_of(task))

    def dispatched(self, group_id: str, domain: str, image: str, num_episodes: int) -> None:
        """A group starts."""
        probes = self._breakers.dispatched(group_id, domain, image)
        self._coming[group_id] = num_episodes
        if probes:
            ahead = self._gate.starts(group_id, self._num_first, num_episodes)
            self._coming[group_id] = ahead
        self._box_s[group_id] = 0.0
        for _ in range(num_episodes):
            self._retries.started()

    def box_seconds(self, group_id: str) -> float:
        """How long the episodes of a group under way have held boxes."""
        return self._box_s.get(group_id, 0.0)

    def completed(self, group: Group) -> None:
        """A group came back."""
        scored = sum(r.verdict.score is not None for r in group.rollouts)
        for rollout in group.rollouts:
            if rollout.verdict.score is not None:
                tokens = float(rollout.num_sampled_tokens)
                self._lengths.finished(group.domain, group.group_id, tokens)
        self._gone(group.group_id, clean=2 * scored >= len(group.rollouts))

    def cancelled(self, group_id: str) -> None:
        """A group was given up."""
        self._gone(group_id, clean=False)

    def table(self) -> tuple[BreakerRow, ...]:
        """Breakers that have seen a failure."""
        return self._breakers.table()

    def status(self) -> dict[str, Any]:
        """For people."""
        r = self._retries
        return {
            "load_target": self._load.target_ratio,
            "load_decreases": self._load.num_decreases,
            "retries": r.num_retries,
            "retries_refused": r.num_refused,
            "retries_late": r.num_late,
            "boxes_hedged": self._hedging.num_hedged if self._hedging is not None else 0,
            "bad_cases": len(self.cases),
        }

    def take_cases(self) -> tuple[BadCase, ...]:
        """Cases for the quality gate since the last call."""
        return self.cases.take()

    # For the collector.

    def asks(self, task: Task, group_id: str, turn: int) -> int:
        """Urgency of a request; the engine serves continuing turns first by itself."""
        if turn == 0 and self._coming.get(group_id, 0) > 0:
            self._coming[group_id] -= 1
        predicted = self._lengths.predict(task.domain, group_id)
        return min(int(_LEVELS * predicted / max(task.max_tokens, 1)), _LEVELS - 1)

    async def may_begin(self, group_id: str, sample: int) -> None:
        """Samples of a probe wait for its first ones."""
        await self._gate.wait(group_id, sample)

    def sandboxes(self, pool: SandboxPool, group_id: str) -> SandboxPool:
        """The pool as a group sees it."""

        def held(seconds: float) -> None:
            if group_id in self._box_s:
                self._box_s[group_id] += seconds

        return GroupPool(pool, self._clock, self._hedging, held)

    def attempt(self, task: Task, group_id: str, failure: Failure | None, attempts: int) -> bool:
        """An attempt ended; True to try again."""
        image = image_of(task)
        kind = None if failure is None else failure.kind
        reaction = self._breakers.attempt(
            Attempt(domain=task.domain, task=group_id, image=image, failure=kind)
        )
        if failure is not None:
            self.cases.report(task.domain, group_id, image, self._digest_of(task.domain), failure)
        for key in reaction.opened:
            self.on_opened(key.domain, key.kind)
        if reaction.abandon and kind in RETRIED:
            self.on_abandon(group_id)
        again = (
            failure is not None
            and not reaction.opened
            and not reaction.abandon
            and self._retries.may_retry(failure.kind, attempts, self._used_lag(group_id))
        )
        if group_id in self._coming:
            released = 0 if again else self._gate.ended(group_id, well=failure is None)
            self._coming[group_id] += again + released
        if not again:
            self.on_room()
        return again

    def _gone(self, group_id: str, *, clean: bool) -> None:
        self._coming.pop(group_id, None)
        self._gate.gone(group_id)
        self._box_s.pop(group_id, None)
        self._lengths.forget(group_id)
        self._breakers.group_done(group_id, clean=clean)


def image_of(task: Task) -> str:
    """The box image that a task asks for; empty if none."""
    image = task.payload.get("image")
    return image if isinstance(image, str) else ""
