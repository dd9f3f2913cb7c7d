"""The phases in order, and where a resumed run goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Any

from burnish.core.clock import Clock
from burnish.core.errors import ClassifiedFailure, UserError, one_line
from burnish.core.observer import RunObserver, RunPhase
from burnish.core.protocols import Environment
from burnish.core.records import Failure
from burnish.model.loading import LoadedModel, export
from burnish.observe.report import write_report
from burnish.rollout.collect.collector import Sampling
from burnish.run.config import EngineBackend, RunConfig
from burnish.run.control.handler import ControlHandler
from burnish.run.control.messages import socket_path
from burnish.run.control.roster import Roster
from burnish.run.control.server import serve_control
from burnish.run.facts import versions
from burnish.run.flow import FlowControl, FlowSettings
from burnish.run.health import Health
from burnish.run.hedging import BoxHedging
from burnish.run.intake import Intake
from burnish.run.interrupts import Interrupts
from burnish.run.loop import Loop
from burnish.run.loop_parts import LoopConfig, LoopParts
from burnish.run.phases import (
    check_environments,
    evaluation,
    held_out_suite,
    results_by_name,
)
from burnish.run.restore import begin_or_restore, refuse_lost_checkpoints
from burnish.run.result import run_result, worked_seconds
from burnish.run.session import Session, open_session
from burnish.run.step_report import StepReporter, peak_rss_bytes
from burnish.schedule.admission import Admission, AdmissionConfig, AdmissionMode
from burnish.schedule.breakers.retries import RetryConfig
from burnish.schedule.curriculum.curriculum import Curriculum
from burnish.schedule.domains import DomainScheduler
from burnish.schedule.flow.load import EngineLoad
from burnish.schedule.flow.resources import GroupCosts
from burnish.schedule.flow.rounds import LongTail
from burnish.store.run_directory import EvalName, RunDirectory
from burnish.telemetry.events import EventKind, read_events
from burnish.train import checkpoint
from burnish.train.advantages import RunningScale
from burnish.train.config import Algorithm


class RunInterrupted(KeyboardInterrupt):
    """Somebody asked to stop; the message says how to go on."""

    def __init__(self, run: Path) -> None:
        """Name the command."""
        super().__init__(f"Stopped. Go on with: burnish run --resume {run}")


async def execute(
    config: RunConfig,
    loaded: LoadedModel,
    environments: Mapping[str, Environment],
    directory: RunDirectory,
    observer: RunObserver,
    clock: Clock,
) -> dict[str, Any]:
    """Go through all phases that are not done yet; returns the content of `result.json`.

    Raises:
        RunInterrupted: after an interrupt; everything finished is on the disk.
        ClassifiedFailure: for what failed.
    """
    main = asyncio.current_task()
    assert main is not None
    interrupts = Interrupts(main)
    saved = checkpoint.latest(directory.checkpoints)
    kind = EventKind.RUN_STARTED if saved is None else EventKind.RUN_RESUMED
    refuse_lost_checkpoints(directory)
    directory.events.emit(kind, 0)
    failures = _FailureSink(directory, observer)
    with interrupts.installed():
        try:
            async with open_session(
                config, loaded, environments, directory, observer, clock, failures
            ) as session:
                return await _phases(session, interrupts, failures)
        except asyncio.CancelledError:
            directory.events.emit(EventKind.RUN_INTERRUPTED, 0)
            raise RunInterrupted(directory.path) from None
        except BaseExceptionGroup as group:
            cause = _first_cause(group)
            directory.events.emit(EventKind.RUN_FAILED, 0, reason=one_line(cause))
            raise cause from group
        except (ClassifiedFailure, UserError) as error:
            directory.events.emit(EventKind.RUN_FAILED, 0, reason=one_line(error))
            raise


class _FailureSink:
    """Failures go to the reporter of the loop while there is one, else straight to the disk."""

    def __init__(self, directory: RunDirectory, observer: RunObserver) -> None:
        self._directory, self._observer = directory, observer
        self.reporter: StepReporter | None = None

    def __call__(self, failure: Failure) -> None:
        if self.reporter is not None:
            self.reporter.failure(failure)
            return
        self._directory.append_failure(0, failure.where, failure)
        self._observer.failure(failure)


async def _phases(
    session: Session, interrupts: Interrupts, failures: _FailureSink
) -> dict[str, Any]:
    gated = await check_environments(session)
    environments = gated.environments
    suite = held_out_suite(session, environments)
    if suite is not None:
        await evaluation(session, environments, suite, EvalName.BEFORE)
    payload = await begin_or_restore(session, environments)
    warms = session.config.warmup.examples_per_domain > 0
    if suite is not None and warms and payload["step"] == 0:
        await evaluation(session, environments, suite, EvalName.WARMED)
    roster = Roster(payload.get("roster"))
    environments = {**environments, **roster.restore()}
    scheduler = _scheduler(session.config, environments, payload)
    loop, parts = _loop(session, environments, roster, scheduler, payload)
    failures.reporter = parts.reporter
    session.observer.phase(RunPhase.TRAIN, session.config.run.steps)
    control = serve_control(
        socket_path(session.directory.path), ControlHandler(session, loop, parts)
    )
    async with control:
        with interrupts.gently(loop.stop):
            reached = await loop.run()
    failures.reporter = None
    session.collector.watch = None
    if not reached:
        session.directory.events.emit(EventKind.RUN_INTERRUPTED, loop.finished_steps)
        raise RunInterrupted(session.directory.path)
    if suite is not None:
        await evaluation(session, environments, suite, EvalName.AFTER)
    lost = {row.domain: row.quarantined for row in scheduler.table() if row.quarantined}
    return await _finish(session, {**gated.quarantined, **lost})


def _loop(
    session: Session,
    environments: MutableMapping[str, Environment],
    roster: Roster,
    scheduler: DomainScheduler,
    payload: Mapping[str, Any],
) -> tuple[Loop, LoopParts]:
    """The loop as it was at the checkpoint that `payload` comes from, or at its beginning."""
    config, step = session.config, int(payload["step"])
    rollouts = session.directory.rollouts
    rollouts.discard(rollouts.groups_newer_than(1 + step))
    session.directory.rollback_to(step)
    reporter = StepReporter(
        session.directory,
        session.observer,
        session.clock,
        num_steps=config.run.steps,
        engine_stats=session.engine.stats,
        box_use=session.pool.take,
    )
    is_grpo = config.train.loss.algorithm is Algorithm.GRPO
    settings = LoopConfig(
        num_steps=config.run.steps,
        group_size=config.rollout.group_size,
        sampling=Sampling(config.rollout.temperature, config.rollout.top_p),
        seed=config.run.seed,
        deterministic=config.run.deterministic,
        checkpoint_every_steps=config.run.checkpoint_every_steps,
        normaliser="group" if is_grpo else "domain",
    )
    admission = _admission(config, payload)
    flow = _flow(session, environments, reporter, admission)
    parts = LoopParts(
        environments=environments,
        roster=roster,
        scheduler=scheduler,
        admission=admission,
        scale=RunningScale.from_state(payload.get("scale", {})),
        health=_health(session, payload),
        flow=flow,
        intake=_intake(config, environments, scheduler, flow, reporter, payload),
        collector=session.collector,
        trainer=session.trainer,
        publisher=session.publisher,
        directory=session.directory,
        reporter=reporter,
    )
    return Loop(settings, parts, finished_steps=step), parts


def _scheduler(
    config: RunConfig, environments: Mapping[str, Environment], payload: Mapping[str, Any]
) -> DomainScheduler:
    # Wishes for a domain that the gate shut out have nobody to apply to.
    wishes = {n: wish for n, wish in config.schedule.domains.items() if n in environments}
    schedule = config.schedule.model_copy(update={"domains": wishes})
    if "scheduler" in payload:
        return DomainScheduler.from_state(payload["scheduler"], schedule)
    return DomainScheduler(tuple(environments), schedule)


def _intake(
    config: RunConfig,
    environments: Mapping[str, Environment],
    scheduler: DomainScheduler,
    flow: FlowControl | None,
    reporter: StepReporter,
    payload: Mapping[str, Any],
) -> Intake:
    curriculum = Curriculum(
        config.schedule.curriculum,
        group_size=config.rollout.group_size,
        window=config.rollout.groups_per_step,
        seed=config.run.seed,
        first_item=config.warmup.examples_per_domain,
    )
    wait = config.flow.round_max_wait
    rounds = LongTail(config.rollout.groups_per_step, wait) if wait and flow is not None else None
    costs = GroupCosts(config.engine.max_running, config.sandbox.max_boxes)
    intake = Intake(environments, scheduler, curriculum, flow, rounds, costs)
    intake.on_round = reporter.round
    if "intake" in payload:
        intake.load(payload["intake"])
    return intake


def _admission(config: RunConfig, payload: Mapping[str, Any]) -> Admission:
    settings = AdmissionConfig(
        mode=AdmissionMode.FIXED_LAG if config.run.deterministic else AdmissionMode.BOUNDED_LAG,
        max_lag=config.rollout.max_lag,
        groups_per_batch=config.rollout.groups_per_step,
        max_refills=config.rollout.max_refills,
    )
    if "admission" in payload:
        return Admission.from_state(payload["admission"], settings)
    return Admission(settings, 1 + int(payload["step"]), config.run.steps)


def _health(session: Session, payload: Mapping[str, Any]) -> Health:
    return Health(
        failures_to_quarantine=session.config.rollout.failures_to_quarantine,
        state=payload.get("health"),
    )


def _flow(
    session: Session,
    environments: Mapping[str, Environment],
    reporter: StepReporter,
    admission: Admission,
) -> FlowControl | None:
    """Breakers and load start afresh after a resume: the machine is another."""
    config = session.config
    if config.run.deterministic:
        return None
    settings = FlowSettings(
        config.flow.load,
        config.flow.breakers,
        RetryConfig(max_attempts=config.rollout.max_attempts, budget_ratio=config.flow.retry_ratio),
    )
    slots = config.engine.max_running if config.engine.backend is EngineBackend.LOCAL else None

    def load() -> EngineLoad:
        stats = session.engine.stats()
        return EngineLoad(
            num_slots=slots or 0,
            num_running=stats.num_running or 0,
            num_waiting=stats.num_waiting or 0,
            kv_ratio=stats.used_page_ratio or 0.0,
            num_preemptions=stats.num_preemptions or 0,
            queue_s=0.0,
        )

    hedging = None
    if config.flow.hedge_boxes and len(config.sandbox.hosts) > 1:
        hedging = BoxHedging(session.clock)
        hedging.on_hedged = reporter.hedged
    flow = FlowControl(
        settings,
        session.clock,
        None if slots is None else load,
        lambda domain: environments[domain].digest,
        admission.used_lag,
        hedging,
    )
    session.collector.watch = flow
    return flow


async def _finish(session: Session, quarantined: Mapping[str, str]) -> dict[str, Any]:
    """Export the model, write result and report."""
    session.observer.phase(RunPhase.REPORT, 0)
    directory = session.directory
    model = directory.path / "model"
    # The trainer's decoder holds the masters rounded to the compute dtype: what was served.
    await asyncio.to_thread(export, session.loaded.decoder, session.loaded, model)
    directory.events.emit(EventKind.RUN_FINISHED, session.config.run.steps)
    result = run_result(
        run_dir=directory.path,
        wall_s=worked_seconds(read_events(directory.path / "events.jsonl")),
        peak_rss_bytes=peak_rss_bytes(),
        results=results_by_name(directory.path),
        ledger=directory.ledger.counts(),
        canary=session.publisher.summary(),
        versions=versions(),
        quarantined=quarantined,
        model=model,
    )
    directory.write_result(result)
    if result["ledger"]["trained"] == 0:
        session.observer.note("no step had a gradient: the model is unchanged")
    await asyncio.to_thread(write_report, directory.path)
    return result


def _first_cause(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error that began it; the others are its echo."""
    first = group.exceptions[0]
    return _first_cause(first) if isinstance(first, BaseExceptionGroup) else first
