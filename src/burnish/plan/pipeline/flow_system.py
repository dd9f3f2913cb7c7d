"""The flow control of the real run inside the simulation, on a simulated clock.

The same ledger, batcher, load control, breakers, retry budget and order of service.
"""

from __future__ import annotations

from collections import deque

from burnish.core.vocabulary import DropReason, FailureKind
from burnish.plan.pipeline.episode import SimEpisode, SimGroup
from burnish.plan.pipeline.simulator import Simulator
from burnish.plan.pipeline.workload import (
    BROKEN_RATIO,
    HEALTHY_RATIO,
    SimDomain,
    failure_ratio,
)
from burnish.schedule.admission import Admission, AdmissionConfig
from burnish.schedule.batcher import BatchStatus, plan_batch
from burnish.schedule.breakers.base import Attempt, BreakerConfig
from burnish.schedule.breakers.panel import Breakers
from burnish.schedule.breakers.retries import RetryBudget, RetryConfig
from burnish.schedule.flow.load import LoadConfig, LoadControl
from burnish.schedule.flow.order import Lengths, Waiting, rank
from burnish.schedule.flow.rounds import LongTail

# A domain is long by its upper quartile, as in the run.
_LONG = 0.75
# A group with no more than this part of its samples to go is let finish when its breaker opens.
_KEPT_LEFT = 0.75


class Flow:
    """Load-based admission behind breakers. See the module text."""

    def __init__(
        self,
        groups_per_batch: int,
        max_lag: int = 4,
        *,
        load: LoadConfig | None = None,
        with_breakers: bool = True,
        round_max_wait: int = 0,
    ) -> None:
        """Without breakers it shows what they are worth; with a wait, what rounds are."""
        self._ledger = Admission(
            AdmissionConfig(groups_per_batch=groups_per_batch, max_lag=max_lag, max_refills=1000)
        )
        self._load = LoadControl(load or LoadConfig())
        self._retries = RetryBudget(RetryConfig())
        self._lengths = Lengths()
        self._rounds = LongTail(groups_per_batch, round_max_wait) if round_max_wait else None
        self._ready: deque[str] = deque()
        self._with_breakers = with_breakers
        self._config = BreakerConfig()
        self._breakers: Breakers | None = None
        # Equal groups for every domain, as the baselines give them: what is compared is the flow.
        self._num_groups: dict[str, int] = {}
        self._shelf: dict[str, SimGroup] = {}
        self._waiting: dict[int, Waiting] = {}
        self._attempts: dict[str, int] = {}
        self._first_failure_s: dict[str, float] = {}
        self._waits_for: frozenset[str] = frozenset()
        self._is_new = True  # what was judged under the last version may be stale under this one
        self.opened: dict[str, tuple[int, float]] = {}
        self.false_opens: list[str] = []
        self.num_failed: dict[str, int] = {}

    def fill(self, sim: Simulator) -> None:
        """As many groups as the engines have room for and the lag allows."""
        breakers = self._panel(sim)
        room = self._load.room(sim.load(), sim.num_coming, sim.clock.now_s())
        while 2 * room >= sim.group_size and self._ledger.may_dispatch():
            group_id = self._due(sim) or self._picked(sim)
            if group_id is None:
                return
            name = group_id.partition("/")[0]
            probes = breakers.dispatched(group_id, name)
            self._ledger.dispatched(group_id)
            first = self._config.probe_samples if probes else None
            sim.launch(sim.workload.domains[int(name[1:])], group_id, first)
            for _ in range(sim.group_size):
                self._retries.started()
            room -= first or sim.group_size

    def _picked(self, sim: Simulator) -> str | None:
        """The next group of the domain that had fewest, unless it waits for its round."""
        blocked = self._panel(sim).blocked() if self._with_breakers else frozenset()
        eligible = [d.name for d in sim.workload.domains if d.name not in blocked]
        while eligible:
            name = min(eligible, key=lambda d: self._num_groups.get(d, 0))
            count = self._num_groups[name] = self._num_groups.get(name, 0) + 1
            group_id = f"{name}/{count}"
            expected, usual = self._lengths.quantile(name, _LONG), self._lengths.usual()
            if self._rounds is None or not self._rounds.defers(
                group_id, expected, usual, sim.version
            ):
                return group_id
            # Ends: a round that is full begins at once.
            if (due := self._due(sim)) is not None:
                return due
        return None

    def _due(self, sim: Simulator) -> str | None:
        if self._rounds is not None and not self._ready:
            self._ready.extend(self._rounds.round(sim.version))
        return self._ready.popleft() if self._ready else None

    def choose(self, sim: Simulator, queue: list[SimEpisode]) -> int:
        """By the run's order of service."""
        if len(queue) == 1:
            return 0
        now = sim.clock.now_s()
        ranks = [rank(self._claim(episode), now) for episode in queue]
        return min(range(len(queue)), key=ranks.__getitem__)

    def failed(self, sim: Simulator, episode: SimEpisode) -> bool:
        """To the breakers; what they open is cancelled on the spot."""
        breakers = self._panel(sim)
        domain = episode.group.domain
        self._note(sim, domain.name)
        self.num_failed[domain.name] = self.num_failed.get(domain.name, 0) + 1
        late = self._ledger.used_lag(episode.group.group_id)
        if not self._with_breakers:
            return self._retries.may_retry(FailureKind.SANDBOX, episode.attempts, late)
        reaction = breakers.attempt(
            Attempt(
                domain=domain.name,
                task=episode.group.group_id,
                failure=FailureKind.SANDBOX,
            )
        )
        if reaction.opened:
            self._opens(sim, domain)
            mine = [g for g in sim.groups.values() if g.domain is domain]
            for group in mine:
                if group.left > _KEPT_LEFT * sim.group_size:
                    sim.drop(group)
            return False
        if reaction.abandon:
            sim.drop(episode.group)
            return False
        return self._retries.may_retry(FailureKind.SANDBOX, episode.attempts, late)

    def judged(self, sim: Simulator, episode: SimEpisode) -> None:
        """Lengths and breakers learn."""
        breakers = self._panel(sim)
        group = episode.group
        self._attempts[group.domain.name] = self._attempts.get(group.domain.name, 0) + 1
        self._lengths.finished(group.domain.name, group.group_id, episode.tokens)
        breakers.attempt(Attempt(domain=group.domain.name, task=group.group_id))
        sim.release(group)

    def ended(self, sim: Simulator, group: SimGroup, *, trainable: bool) -> None:
        """Into the ledger."""
        breakers = self._panel(sim)
        clean = trainable and group.num_failed <= sim.group_size // 2
        breakers.group_done(group.group_id, clean=clean)
        self._lengths.forget(group.group_id)
        if group.group_id in self._waits_for:
            self._waits_for = frozenset()
        if trainable:
            self._ledger.completed(group.group_id)
            self._shelf[group.group_id] = group
        else:
            self._ledger.dropped(group.group_id, DropReason.INVALID)

    def next_batch(self, sim: Simulator) -> list[SimGroup] | None:
        """By the run's batcher."""
        if not self._is_new and self._nothing_new(sim):
            return None
        self._is_new = False
        plan = plan_batch(self._ledger)
        self._waits_for = frozenset(plan.waits_for if plan.status is BatchStatus.HELD else ())
        for group_id in plan.stale:
            sim.wasted_tokens += self._shelf.pop(group_id).tokens
            self._ledger.dropped(group_id, DropReason.STALE)
        if plan.status is not BatchStatus.READY:
            return None
        self._ledger.trained(plan.group_ids)
        return [self._shelf.pop(group_id) for group_id in plan.group_ids]

    def _nothing_new(self, sim: Simulator) -> bool:
        """Whether a plan would be that of before, as looking at all groups would find.

        Too few are judged; or it is held by groups that are due earlier than all that could end
        meanwhile, and none of those has ended.
        """
        lacks = len(self._shelf) < self._ledger.config.groups_per_batch
        return bool(self._waits_for) or (lacks and bool(sim.groups))

    def trained(self, sim: Simulator) -> None:
        """A version is out."""
        self._ledger.published(sim.version)
        self._is_new = True

    def _panel(self, sim: Simulator) -> Breakers:
        if self._breakers is None:
            self._breakers = Breakers(self._config, sim.clock)
        return self._breakers

    def _claim(self, episode: SimEpisode) -> Waiting:
        domain, group_id = episode.group.domain.name, episode.group.group_id
        predicted = self._lengths.predict(domain, group_id) if episode.turn == 0 else 0.0
        return Waiting(group_id, domain, episode.turn, 0.0, predicted, episode.asked_s)

    def _note(self, sim: Simulator, domain: str) -> None:
        self._attempts[domain] = self._attempts.get(domain, 0) + 1
        self._first_failure_s.setdefault(domain, sim.clock.now_s())

    def _opens(self, sim: Simulator, domain: SimDomain) -> None:
        ratio = failure_ratio(domain, sim.workload)
        if ratio <= HEALTHY_RATIO:
            self.false_opens.append(domain.name)
        elif ratio >= BROKEN_RATIO and domain.name not in self.opened:
            seconds = sim.clock.now_s() - self._first_failure_s[domain.name]
            self.opened[domain.name] = (self._attempts[domain.name], seconds)
