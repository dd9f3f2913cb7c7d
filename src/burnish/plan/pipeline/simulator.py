"""Episodes through engines, tools, verifiers and a trainer, event by event.

    system.fill --group--> reset --> engine queue --> engine --> tool --.
        ^                                 ^-----------------------------'
        |                                               | last turn
        '-- system.finished <-- group <-- judgement <---'
                  |
                  '--> system.next_batch --> trainer --> version + 1

A system (`systems.py`) decides what to start, who is served, what becomes of failures, and when to
train. The one called `flow` is made of the objects of the real run; only the clock is another.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from burnish.core.clock import ManualClock
from burnish.plan.pipeline.contract import ClusterModel, System
from burnish.plan.pipeline.engines import Fleet, SimEngine
from burnish.plan.pipeline.episode import SimEpisode, SimGroup
from burnish.plan.pipeline.result import PipelineResult, percentile
from burnish.plan.pipeline.workload import TOOL_SIGMA, SimDomain, Workload
from burnish.schedule.flow.load import EngineLoad

_MIN_SEGMENT = 8.0


class Simulator:
    """One run. See the module text."""

    def __init__(
        self,
        workload: Workload,
        cluster: ClusterModel,
        system: System,
        *,
        seed: int,
        group_size: int,
    ) -> None:
        """Nothing has happened yet."""
        self.workload, self.cluster, self.system = workload, cluster, system
        self.group_size = group_size
        self.clock = ManualClock()
        self.rng = np.random.default_rng([seed, 2])
        self._fleet = Fleet(cluster.engine, cluster.num_engines)
        self.engines = self._fleet.engines
        self.queue: list[SimEpisode] = []
        self.groups: dict[str, SimGroup] = {}
        self.version = 0
        self.is_training = False
        self.num_coming = 0
        self.num_groups = 0
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._number = 0
        self._filling = False
        self._reset_counters()

    def _reset_counters(self) -> None:
        self.started_s = self.clock.now_s()
        self.good_tokens = self.wasted_tokens = self.trainer_s = self.prefill_s = 0.0
        self.num_failed = 0
        self.waits_s: list[float] = []
        self.lags: list[float] = []
        for engine in self.engines:
            engine.advance(self.started_s)
            engine.busy_s = engine.load_s = 0.0

    def run(self, num_steps: int, warmup_steps: int) -> PipelineResult:
        """Simulate `warmup_steps + num_steps` steps; measure the last `num_steps`."""
        self.fill()
        measured = False
        while self.version < warmup_steps + num_steps:
            assert self._events, "the pipeline stands still"
            at_s, _, action, arguments = heapq.heappop(self._events)
            self.clock.advance(at_s - self.clock.now_s())
            action(*arguments)
            if not measured and self.version >= warmup_steps:
                measured = True
                self._reset_counters()
        return self._result(num_steps)

    # What systems may do.

    def fill(self) -> None:
        """Ask the system to start groups; not while it is already at it."""
        if self._filling:
            return
        self._filling = True
        self.system.fill(self)
        self._filling = False
        self._maybe_train()

    def launch(self, domain: SimDomain, group_id: str, num_first: int | None = None) -> SimGroup:
        """Start a group; with `num_first` the other samples wait for `release`."""
        group = SimGroup(group_id, domain, self.version, self.group_size)
        self.groups[group_id] = group
        self.num_groups += 1
        for _ in range(self.group_size):
            turns = 1 + int(self.rng.poisson(domain.mean_turns - 1.0)) if domain.is_agent else 1
            turns = min(turns, self.workload.max_turns)
            episode = SimEpisode(group, turns, self.clock.now_s())
            group.episodes.append(episode)
            if num_first is not None and len(group.episodes) > num_first:
                group.held.append(episode)
            else:
                self._admit(episode)
        return group

    def release(self, group: SimGroup) -> None:
        """Start the samples of a group that wait."""
        held, group.held = group.held, []
        for episode in held:
            self._admit(episode)

    def drop(self, group: SimGroup) -> None:
        """Give a group up: its episodes end here and all that they made is wasted."""
        if group.is_gone:
            return
        self._forget(group)
        self.wasted_tokens += group.tokens
        for episode in group.episodes:
            if not episode.is_over:
                self._kill(episode)
        self.system.ended(self, group, trainable=False)

    def load(self) -> EngineLoad:
        """Of all engines together."""
        now = self.clock.now_s()
        # Whoever asked first stands first, whoever was served in between.
        oldest = self.queue[0].asked_s if self.queue else now
        return EngineLoad(
            num_slots=len(self.engines) * self.cluster.engine.num_slots,
            num_running=self._fleet.num_running,
            num_waiting=len(self.queue),
            kv_ratio=0.0,
            num_preemptions=0,
            queue_s=now - oldest,
        )

    # Life of an episode.

    def _admit(self, episode: SimEpisode) -> None:
        episode.is_coming = True
        self.num_coming += 1
        self._begin(episode)

    def _begin(self, episode: SimEpisode) -> None:
        domain = episode.group.domain
        episode.tokens, episode.turn = 0.0, 0
        if domain.is_agent:
            reset = float(self.rng.lognormal(math.log(domain.reset_s), 0.8))
            self._after(min(reset, self.workload.call_timeout_s), self._ask, episode)
        else:
            self._ask(episode)

    def _ask(self, episode: SimEpisode) -> None:
        if episode.is_over:
            return
        domain = episode.group.domain
        drawn = float(self.rng.lognormal(math.log(domain.segment_tokens), domain.segment_sigma))
        left = self.workload.max_tokens - episode.tokens
        episode.segment = max(min(drawn, left), _MIN_SEGMENT)
        episode.asked_s = self.clock.now_s()
        if episode.is_coming:
            episode.is_coming = False
            self.num_coming -= 1
        self.queue.append(episode)
        self._serve()

    def _serve(self) -> None:
        now = self.clock.now_s()
        while self.queue:
            engine = self._fleet.idlest()
            if engine is None:
                return
            episode = self.queue.pop(self.system.choose(self, self.queue))
            engine.advance(now)
            self._number += 1
            engine.add(episode, self._number)
            self._fleet.changed(engine)
            episode.engine = engine
            self.waits_s.append(now - episode.asked_s)
            self._expect(engine)

    def _expect(self, engine: SimEngine) -> None:
        """Schedule the engine's next end; earlier plans are void."""
        engine.ticket += 1
        end_s = engine.next_end_s()
        if end_s is not None:
            self._after(end_s, self._segment_ends, engine, engine.ticket)

    def _segment_ends(self, engine: SimEngine, ticket: int) -> None:
        if ticket != engine.ticket:
            return
        engine.advance(self.clock.now_s())
        done = engine.ended()
        self._fleet.changed(engine)
        self._expect(engine)
        for episode in done:
            episode.engine = None
            episode.tokens += episode.segment
            episode.turn += 1
            self._turn_ends(episode)
        self._serve()
        self.fill()

    def _turn_ends(self, episode: SimEpisode) -> None:
        domain, workload = episode.group.domain, self.workload
        if episode.turn < episode.num_turns and episode.tokens < workload.max_tokens:
            crashes = bool(self.rng.random() < domain.crash_ratio)
            seconds = float(self.rng.lognormal(math.log(domain.tool_s), TOOL_SIGMA))
            if crashes or seconds >= workload.call_timeout_s:
                self._after(workload.call_timeout_s, self._fails, episode)
            else:
                self._after(seconds, self._ask, episode)
            return
        seconds = domain.reward_s * float(self.rng.lognormal(0.0, 0.6))
        if domain.reward_hang_ratio and self.rng.random() < domain.reward_hang_ratio:
            seconds = workload.reward_timeout_s
        self._after(seconds, self._is_judged, episode)

    def _fails(self, episode: SimEpisode) -> None:
        if episode.is_over:
            return
        self.num_failed += 1
        self.wasted_tokens += episode.tokens
        # Settled before the system hears of it: dropping the group must not count it twice.
        episode.tokens = 0.0
        again = self.system.failed(self, episode)
        if episode.is_over:
            self.fill()
        elif again:
            episode.attempts += 1
            self._begin(episode)
        else:
            episode.group.num_failed += 1
            self._sample_ends(episode)

    def _is_judged(self, episode: SimEpisode) -> None:
        if episode.is_over:
            return
        episode.group.tokens += episode.tokens
        self.system.judged(self, episode)
        self._sample_ends(episode)

    def _sample_ends(self, episode: SimEpisode) -> None:
        episode.is_over = True
        group = episode.group
        group.left -= 1
        if group.left == len(group.held):
            # Nobody came through, and nobody else will: the others may try.
            self.release(group)
        if group.left == 0:
            if group.num_failed > self.group_size // 2:
                self.drop(group)
            else:
                self._forget(group)
                self.system.ended(self, group, trainable=True)
        self.fill()

    def _forget(self, group: SimGroup) -> None:
        group.is_gone = True
        del self.groups[group.group_id]

    def _kill(self, episode: SimEpisode) -> None:
        episode.is_over = True
        self.wasted_tokens += episode.tokens
        if episode.is_coming:
            episode.is_coming = False
            self.num_coming -= 1
        elif episode.engine is not None:
            episode.engine.advance(self.clock.now_s())
            self.wasted_tokens += episode.engine.remove(episode)
            self._fleet.changed(episode.engine)
            self._expect(episode.engine)
        elif episode in self.queue:
            self.queue.remove(episode)

    # Training.

    def _maybe_train(self) -> None:
        if self.is_training:
            return
        batch = self.system.next_batch(self)
        if batch is None:
            return
        self.is_training = True
        tokens = sum(group.tokens for group in batch)
        seconds = tokens / (self.cluster.train_tokens_per_s * self.cluster.num_trainers)
        lags = [float(self.version - group.version) for group in batch]
        shared = self.cluster.train_ratio == 0.0
        if shared:
            self._freeze()
        publish_s = self.cluster.publish_s * (3.0 if shared else 1.0)
        self._after(seconds + publish_s, self._publishes, tokens, seconds, lags)

    def _publishes(self, tokens: float, seconds: float, lags: list[float]) -> None:
        # Counted only now, so that a measured interval holds whole steps.
        self.good_tokens += tokens
        self.trainer_s += seconds
        self.lags += lags
        self.is_training = False
        self.version += 1
        if self.cluster.train_ratio == 0.0:
            self._thaw()
        self.system.trained(self)
        self._serve()
        self.fill()

    def _freeze(self) -> None:
        for engine in self.engines:
            engine.advance(self.clock.now_s())
            engine.frozen = True
            self._expect(engine)

    def _thaw(self) -> None:
        """Sequences that were cut off lost their keys and values to the trainer."""
        rate = self.cluster.prefill_tokens_per_s
        for engine in self.engines:
            lost = sum(episode.tokens for _, _, episode in engine.heap)
            lost += sum(e.segment - (end - engine.made) for end, _, e in engine.heap)
            seconds = lost / rate if rate > 0.0 else 0.0
            self.prefill_s += seconds
            self._after(seconds, self._go_on, engine)

    def _go_on(self, engine: SimEngine) -> None:
        engine.advance(self.clock.now_s())
        engine.frozen = self.is_training
        self._fleet.changed(engine)
        self._expect(engine)
        self._serve()

    def _after(self, seconds: float, action: Callable[..., None], *arguments: Any) -> None:
        self._number += 1
        heapq.heappush(
            self._events, (self.clock.now_s() + seconds, self._number, action, arguments)
        )

    def _result(self, num_steps: int) -> PipelineResult:
        wall = self.clock.now_s() - self.started_s
        for engine in self.engines:
            engine.advance(self.clock.now_s())
        shared = self.cluster.train_ratio == 0.0
        engine_s = wall * len(self.engines)
        sampling_s = engine_s - (self.trainer_s * len(self.engines) if shared else 0.0)
        busy = sum(e.busy_s for e in self.engines) + self.trainer_s * self.cluster.num_trainers
        busy += self.prefill_s
        made = self.good_tokens + self.wasted_tokens
        return PipelineResult(
            tokens_per_s=self.good_tokens / wall,
            slot_load=sum(e.load_s for e in self.engines) / sampling_s,
            idle_ratio=1.0 - busy / (wall * self.cluster.num_accelerators),
            waste_ratio=self.wasted_tokens / made if made else 0.0,
            num_failed=self.num_failed,
            failed_per_step=self.num_failed / num_steps,
            queue_p99_s=percentile(self.waits_s, 99.0),
            lag_mean=float(np.mean(self.lags)) if self.lags else 0.0,
            step_s=wall / num_steps,
        )
