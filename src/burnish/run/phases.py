"""The phases of a run around the loop.

Each leaves its result in the run directory, and a resumed run does not repeat what is there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from burnish.core.disk import write_atomically
from burnish.core.errors import ClassifiedFailure, UserError
from burnish.core.observer import RunPhase
from burnish.core.protocols import Environment
from burnish.core.records import Message, Rollout, Task
from burnish.evaluate.result import EvaluationResult, SampleResult, result_from_json
from burnish.evaluate.runner import evaluate
from burnish.evaluate.suite import Suite, SuiteConfig, build_suite
from burnish.quality.audit import audit
from burnish.quality.gate import Gate
from burnish.rollout.collect.collector import Sampling
from burnish.run.session import Session
from burnish.run.warmup import reference_examples, shuffled_batches
from burnish.store.run_directory import EvalName
from burnish.telemetry.events import EventKind

_EVAL_PHASES = {
    EvalName.BEFORE: RunPhase.EVAL_BEFORE,
    EvalName.WARMED: RunPhase.EVAL_WARMED,
    EvalName.AFTER: RunPhase.EVAL_AFTER,
}


class Gated(NamedTuple):
    """What the quality gate let through."""

    environments: Mapping[str, Environment]
    """By name."""
    quarantined: Mapping[str, str]
    """Name to reason."""


async def check_environments(session: Session) -> Gated:
    """Audit every domain of the mix; the run goes on without those that fail.

    Raises:
        UserError: if none passes.
    """
    observer, events = session.observer, session.directory.events
    observer.phase(RunPhase.CHECK, len(session.environments))

    def count_tokens(messages: Sequence[Message]) -> int:
        return sum(len(session.loaded.renderer.assistant(message)) for message in messages)

    reports = []
    for done, environment in enumerate(session.environments.values(), 1):
        report = await audit(
            environment, session.pool, session.config.quality, count_tokens=count_tokens
        )
        reports.append(report)
        events.emit(
            EventKind.ENVIRONMENT_CHECKED,
            0,
            domain=report.environment,
            digest=report.digest,
            verdict=report.verdict.value,
            reason=report.reason,
        )
        observer.progress(done)
    admission = Gate().admit(reports)
    for name, reason in admission.quarantined.items():
        events.emit(EventKind.ENVIRONMENT_QUARANTINED, 0, domain=name, reason=reason)
        rest = ", the run goes on without it" if admission.admitted else ""
        observer.note(f"{name} is quarantined{rest}: {reason}")
    if not admission.admitted:
        targets = (session.config.domains[n].environment or n for n in admission.quarantined)
        raise UserError(
            "no environment passed the quality gate.",
            fix=f"burnish check {' '.join(targets)} shows why.",
        )
    admitted = {name: session.environments[name] for name in admission.admitted}
    return Gated(admitted, admission.quarantined)


def held_out_suite(session: Session, environments: Mapping[str, Environment]) -> Suite | None:
    """The suite of the run's evaluations; None if evaluation is turned off."""
    section = session.config.evaluate
    if section.tasks_per_domain == 0:
        return None
    config = SuiteConfig(
        num_tasks=section.tasks_per_domain,
        first_task=section.first_task,
        seed=session.config.run.seed,
    )
    return build_suite(environments, config)


async def evaluation(
    session: Session, environments: Mapping[str, Environment], suite: Suite, name: EvalName
) -> EvaluationResult:
    """Held-out pass rates under the weights that the engine serves now; kept if already there."""
    path = session.directory.path / "evals" / f"{name}.json"
    if path.exists():
        return result_from_json(path.read_bytes(), str(path))
    session.observer.phase(_EVAL_PHASES[name], suite.num_samples)
    session.directory.events.emit(EventKind.EVALUATION_STARTED, 0, name=name.value)
    sampling = Sampling(suite.plan.temperature, suite.plan.top_p)
    rollouts: dict[str, Rollout] = {}

    async def collect(task: Task, seed: int) -> Rollout:
        rollout = await session.collector.rollout(
            environments[task.domain], task, sample=0, seed=seed, sampling=sampling
        )
        rollouts[rollout.rollout_id] = rollout
        return rollout

    def told(_: SampleResult) -> None:
        session.observer.progress(len(rollouts))

    deterministic = session.config.run.deterministic
    session.collector.reserve(suite.num_samples)
    result = await evaluate(
        suite,
        environments,
        collect,
        label=name.value,
        # All at once in deterministic mode: who shares a batch must not depend on who is fast.
        max_concurrent=suite.num_samples
        if deterministic
        else session.config.evaluate.max_concurrent,
        max_retries=0,
        on_sample=told,
    )
    ordered = [rollouts[f"{s.domain}/{s.index}/0"] for s in result.samples]
    _note_invalid(session, result)
    session.directory.write_evaluation(name, ordered)
    write_atomically(path, result.to_json())
    summary = {s.domain: s.pass_rate for s in result.summaries()}
    session.directory.events.emit(
        EventKind.EVALUATION_FINISHED, 0, name=name.value, pass_rate=summary
    )
    return result


def _note_invalid(session: Session, result: EvaluationResult) -> None:
    """Failures are told beside the numbers, never hidden in them.

    Raises:
        ClassifiedFailure: if not a single sample has a score: there is nothing to go on with.
    """
    for s in result.summaries():
        if s.num_scored < s.num_samples:
            lost = [x.failure for x in result.samples if x.domain == s.domain and x.failure]
            kinds = Counter(failure.kind.value for failure in lost)
            blamed = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
            session.observer.note(
                f"{result.label}: {s.domain} has {s.num_scored} scored of {s.num_samples} samples; "
                f"failures: {blamed}"
            )
    failures = [sample.failure for sample in result.samples if sample.failure is not None]
    if failures and len(failures) == len(result.samples):
        raise ClassifiedFailure(failures[0])


async def warm_up(session: Session, environments: Mapping[str, Environment]) -> None:
    """Supervised steps on reference solutions; deterministic, so an unfinished one is repeated."""
    config = session.config.warmup
    examples = await reference_examples(
        environments,
        num_per_domain=config.examples_per_domain,
        renderer=session.loaded.renderer,
        context=session.context,
        root_seed=session.config.run.seed,
    )
    batches = shuffled_batches(
        examples,
        batch_examples=config.batch_examples,
        epochs=config.epochs,
        seed=session.config.run.seed,
    )
    session.observer.phase(RunPhase.WARM_UP, len(batches))
    for done, batch in enumerate(batches, 1):
        # Linear decay: the last steps settle what the first ones moved.
        lr = config.lr * (1.0 - (done - 1) / len(batches))
        metrics = await session.trainer.supervised_step(batch, lr=lr)
        session.observer.progress(done)
        session.directory.events.emit(
            EventKind.WARMUP_FINISHED if done == len(batches) else EventKind.STEP_FINISHED,
            0,
            warmup_step=done,
            loss=metrics.loss,
            grad_norm=metrics.grad_norm,
        )


def results_by_name(directory: Path) -> dict[str, EvaluationResult]:
    """Finished evaluations of a run."""
    found = {}
    for name in EvalName:
        path = directory / "evals" / f"{name}.json"
        if path.exists():
            found[name.value] = result_from_json(path.read_bytes(), str(path))
    return found


def first_state() -> dict[str, Any]:
    """Payload of the checkpoint before the first step of reinforcement learning."""
    return {"step": 0}
