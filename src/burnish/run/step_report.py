"""What the loop tells the world: metrics, events, failures and the live view of each step."""

from __future__ import annotations

import resource
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean

import msgspec

from burnish.core.clock import Clock
from burnish.core.group_id import parse_group_id
from burnish.core.observer import RunObserver, RunPhase, StepView
from burnish.core.records import Failure, Group
from burnish.core.vocabulary import DropReason, FailureKind
from burnish.rollout.engine.stats import EngineStats
from burnish.run.engine_report import record_engine
from burnish.run.publish import Publication
from burnish.sandbox.measured import BoxUse
from burnish.schedule.batcher import BatchPlan
from burnish.schedule.breakers.cases import BadCase
from burnish.schedule.domains import DomainScheduler
from burnish.schedule.length_audit import LengthBias
from burnish.store.run_directory import RunDirectory
from burnish.telemetry import catalogue as metric
from burnish.telemetry.events import EventKind
from burnish.telemetry.metrics import Recorder
from burnish.train.metrics import StepMetrics

# Of the last steps, to tell how long the rest will take: enough to smooth one odd step.
_ETA_STEPS = 8


class StepReporter:
    """Collects what happens during a step and writes it out when the step ends."""

    def __init__(
        self,
        directory: RunDirectory,
        observer: RunObserver,
        clock: Clock,
        *,
        num_steps: int,
        engine_stats: Callable[[], EngineStats],
        box_use: Callable[[], BoxUse],
        after_s: float = 0.0,
    ) -> None:
        """Wire it.

        Args:
            directory: where it is written.
            observer: who watches.
            clock: for speeds.
            num_steps: of the run.
            engine_stats: the engine's counters.
            box_use: what was done in sandboxes since the last call.
            after_s: what is expected to follow the last step, for the estimated end.
        """
        self._directory, self._observer, self._clock = directory, observer, clock
        self._num_steps, self._engine_stats, self._after_s = num_steps, engine_stats, after_s
        # What the gate and the warm-up did belongs to no step.
        self._box_use = box_use
        box_use()
        self._recorder = Recorder(metric.CATALOGUE)
        self._last_s = clock.now_s()
        self._last_stats = engine_stats()
        self._step_seconds: list[float] = []
        self._rewards: dict[str, list[float]] = defaultdict(list)
        self._passes: dict[str, list[bool]] = defaultdict(list)
        self._num_failures = self._num_dropped = 0
        self._step = 0
        self._bias_told = False
        self.figures: dict[str, float] = {}

    def group(self, group: Group) -> None:
        """A group was judged."""
        invalid = 0
        for rollout in group.rollouts:
            verdict = rollout.verdict
            if verdict.score is None:
                invalid += 1
                continue
            self._rewards[group.domain].append(verdict.score)
            self._passes[group.domain].append(bool(verdict.passed))
            self._recorder.record(metric.DISPATCHED_LENGTH_MEAN, rollout.num_sampled_tokens)
        scored = len(group.rollouts) - invalid
        self._recorder.record(metric.SCORED_ROLLOUTS, scored, group.domain)
        self._recorder.record(metric.INVALID_ROLLOUTS, invalid, group.domain)

    def dropped(self, group_id: str, reason: DropReason, num_rollouts: int) -> None:
        """Rollouts will not be trained."""
        self._num_dropped += num_rollouts
        self._recorder.record(metric.DROPPED, num_rollouts, reason.value)
        domain = parse_group_id(group_id).domain
        self._recorder.record(
            metric.ZERO_VARIANCE_RATIO, float(reason is DropReason.ZERO_VARIANCE), domain
        )
        self._directory.events.emit(
            EventKind.GROUP_DROPPED,
            self._step,
            group_id=group_id,
            reason=reason.value,
            num_rollouts=num_rollouts,
        )

    def failure(self, failure: Failure) -> None:
        """Something failed and was classified; called for every attempt."""
        if failure.kind is not FailureKind.POLICY:
            self._num_failures += 1
        self._recorder.record(metric.FAILURES, 1, failure.kind.value)
        self._directory.append_failure(self._step, failure.where, failure)
        self._observer.failure(failure)

    def quarantined(self, domain: str, failure: Failure) -> None:
        """An environment is shut out from now on."""
        self._directory.events.emit(
            EventKind.ENVIRONMENT_QUARANTINED, self._step, domain=domain, reason=failure.message
        )
        self._observer.note(f"{domain} is quarantined: {failure.where}: {failure.message}")

    def paused(self, domain: str, kind: str) -> None:
        """A breaker opened."""
        self._directory.events.emit(EventKind.BREAKER_OPENED, self._step, domain=domain, cause=kind)
        self._observer.note(f"{domain} is paused: {kind} failures")

    def round(self, num_groups: int) -> None:
        """Long groups that waited for each other start."""
        self._directory.events.emit(EventKind.ROUND_STARTED, self._step, num_groups=num_groups)

    def hedged(self, call: str, after_s: float) -> None:
        """A second box was asked for."""
        self._directory.events.emit(EventKind.BOX_HEDGED, self._step, call=call, after_s=after_s)

    def cases(self, step: int, cases: Sequence[BadCase]) -> None:
        """Items that failed by their own fault, for whoever mends them."""
        for case in cases:
            self._directory.events.emit(EventKind.BAD_CASE, step, case=msgspec.to_builtins(case))

    def waiting(self, plan: BatchPlan) -> None:
        """The trainer has nothing to do yet."""
        self._recorder.record(metric.QUEUE_DEPTH, len(plan.waits_for), "groups_awaited")

    def step(
        self,
        step: int,
        groups: Sequence[Group],
        metrics: StepMetrics | None,
        publication: Publication,
        scheduler: DomainScheduler,
        items: Mapping[str, str],
        bias: LengthBias,
    ) -> None:
        """A step ended: record it, make it durable, show it; `items` says what is chosen why."""
        self._step = step
        now_s = self._clock.now_s()
        elapsed_s = max(now_s - self._last_s, 1e-9)
        lags = self._trained(groups, publication.version - 1)
        if metrics is not None:
            self._optimisation(metrics, elapsed_s)
        stats = self._engine_stats()
        engine_rate = record_engine(self._recorder, self._last_stats, stats, elapsed_s)
        self._last_stats = stats
        self._health(publication, scheduler, items, elapsed_s)
        self._boxes(self._box_use())
        self._domains()
        self._tell_bias(bias)
        self._write(step)
        self._directory.events.emit(
            EventKind.STEP_FINISHED,
            step,
            version=publication.version,
            groups=[g.group_id for g in groups],
            canary_max_abs_diff=publication.canary_max_abs_diff,
        )
        self._step_seconds.append(elapsed_s)
        self._observer.step(
            StepView(
                phase=RunPhase.TRAIN,
                step=step,
                num_steps=self._num_steps,
                reward={d: fmean(v) for d, v in self._rewards.items()},
                pass_rate={d: fmean(v) for d, v in self._passes.items()},
                engine_tokens_per_s=engine_rate,
                trainer_tokens_per_s=metrics.num_stored_tokens / elapsed_s if metrics else 0.0,
                lag=fmean(lags) if lags else 0.0,
                failures=self._num_failures,
                dropped=self._num_dropped,
                eta_s=self._eta_s(step),
            )
        )
        self._rewards.clear()
        self._passes.clear()
        self._last_s = now_s

    def _write(self, step: int) -> None:
        samples = self._recorder.take()
        self.figures = {sample.name: sample.value for sample in samples if not sample.label}
        self._directory.metrics.append(step, samples)

    def _trained(self, groups: Sequence[Group], trainer_version: int) -> list[int]:
        """Record what entered the loss; returns the lag of each token."""
        lags: list[int] = []
        for group in groups:
            self._recorder.record(metric.ZERO_VARIANCE_RATIO, 0.0, group.domain)
            for rollout in group.rollouts:
                if rollout.verdict.score is None:
                    continue
                tokens = rollout.num_sampled_tokens
                self._recorder.record(metric.TRAINED_ROLLOUTS, 1, group.domain)
                self._recorder.record(metric.TRAINED_TOKENS, tokens, group.domain)
                self._recorder.record(metric.TRAINED_LENGTH_MEAN, tokens)
                pairs = zip(rollout.weight_versions, rollout.sampled_mask, strict=True)
                lags += [trainer_version - v for v, sampled in pairs if sampled]
        if lags:
            self._recorder.record(metric.LAG_MEAN, fmean(lags))
            self._recorder.record(metric.LAG_MAX, max(lags))
        return lags

    def _optimisation(self, m: StepMetrics, elapsed_s: float) -> None:
        values: Mapping[str, float] = {
            metric.LOSS.name: m.loss,
            metric.POLICY_LOSS.name: m.policy_loss,
            metric.GRAD_NORM.name: m.grad_norm,
            metric.LEARNING_RATE.name: m.lr,
            metric.ENTROPY.name: m.entropy,
            metric.CLIP_FRACTION.name: m.clip_ratio,
            metric.KL_ENGINE_K1.name: m.kl_behaviour_k1,
            metric.KL_ENGINE_K3.name: m.kl_behaviour_k3,
            metric.TRAINER_TOKENS_PER_S.name: m.num_stored_tokens / m.seconds,
            metric.TRAINER_BUSY_RATIO.name: min(m.seconds / elapsed_s, 1.0),
        }
        self._recorder.record_all(values)
        if m.kl_reference is not None:
            self._recorder.record(metric.KL_LOSS, m.kl_reference)

    def _health(
        self,
        publication: Publication,
        scheduler: DomainScheduler,
        items: Mapping[str, str],
        elapsed_s: float,
    ) -> None:
        self._recorder.record(metric.STEP_SECONDS, elapsed_s)
        self._recorder.record(metric.PUBLICATION_SECONDS, publication.seconds)
        self._recorder.record(metric.CANARY_MAX_ABS_DIFF, publication.canary_max_abs_diff)
        rows = scheduler.table()
        quarantined = sum(row.quarantined is not None for row in rows)
        self._recorder.record(metric.QUARANTINED_DOMAINS, quarantined)
        for row in rows:
            self._recorder.record(metric.DOMAIN_SHARE, row.share, row.domain)
            self._recorder.record(metric.DOMAIN_MAX_GAP, row.max_gap_picks, row.domain)
        self._directory.events.emit(
            EventKind.SHARES_DECIDED,
            self._step,
            policy=scheduler.policy,
            why={row.domain: scheduler.explain(row.domain).text for row in rows},
            items=dict(items),
            rows={row.domain: row.brief() for row in rows},
        )
        self._recorder.record(metric.RSS_BYTES, peak_rss_bytes())

    def _tell_bias(self, bias: LengthBias) -> None:
        """Say once when what is trained is not what was sampled."""
        if bias.biased and not self._bias_told:
            self._observer.note(
                f"trained rollouts are {bias.mean_ratio:.2f} times as long as trainable ones "
                f"(p = {bias.p_value:.1g}): staleness bends the lengths, lower rollout.max_lag"
            )
        self._bias_told = bias.biased

    def _boxes(self, use: BoxUse) -> None:
        for status, count in use.commands.items():
            self._recorder.record(metric.SANDBOX_COMMANDS, count, status)
        for seconds, mean, most in (
            (use.exec_s, metric.SANDBOX_EXEC_MEAN, metric.SANDBOX_EXEC_MAX),
            (use.waits_s, metric.SANDBOX_WAIT_MEAN, metric.SANDBOX_WAIT_MAX),
        ):
            for value in seconds:
                self._recorder.record(mean, value)
                self._recorder.record(most, value)

    def _domains(self) -> None:
        for domain, rewards in self._rewards.items():
            self._recorder.record(metric.REWARD_MEAN, fmean(rewards), domain)
            self._recorder.record(metric.PASS_RATE, fmean(self._passes[domain]), domain)

    def _eta_s(self, step: int) -> float:
        recent = self._step_seconds[-_ETA_STEPS:]
        return (self._num_steps - step) * fmean(recent) + self._after_s


def peak_rss_bytes() -> int:
    """Largest resident memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
