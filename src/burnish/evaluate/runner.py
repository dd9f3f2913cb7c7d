"""Runs a suite: bounded concurrency, retries for the machinery's failures only, resumable.

    suite.samples() --> round --> collect(task, seed) --> scored, invalid_environment --> result
                          ^                           `-> invalid_infra --.
                          '--------------- next round <-------------------'

Results come out in the suite's order, whatever finished first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping

from burnish.core.errors import ClassifiedFailure
from burnish.core.protocols import Environment
from burnish.core.records import Failure, Rollout, Task
from burnish.core.vocabulary import FailureKind, Outcome
from burnish.evaluate.result import EvaluationResult, SampleResult
from burnish.evaluate.suite import SampleRef, Suite

Collect = Callable[[Task, int], Awaitable[Rollout]]
"""Runs one episode with a seed. Raises ClassifiedFailure when it could not be judged."""


async def evaluate(
    suite: Suite,
    environments: Mapping[str, Environment],
    collect: Collect,
    *,
    label: str,
    max_concurrent: int,
    max_retries: int = 2,
    on_sample: Callable[[SampleResult], None] | None = None,
    done: Iterable[SampleResult] = (),
) -> EvaluationResult:
    """Draw every sample of `suite` once.

    Args:
        suite: what to ask.
        environments: by name; must be those of the suite.
        collect: runs one episode.
        label: name of what is evaluated.
        max_concurrent: episodes at a time.
        max_retries: further rounds for samples lost to infrastructure. A broken environment and a
            failed answer are never retried: that would change what is measured.
        on_sample: told of every sample when it is final: progress and the store.
        done: final samples of an interrupted run, which are kept.

    Raises:
        UserError: if the environments are not those of the suite.
    """
    assert max_concurrent >= 1
    suite.check(environments)
    final = {(s.domain, s.index, s.sample): s for s in done}
    todo = [ref for ref in suite.samples() if _key(ref) not in final]
    for attempt in range(1, max_retries + 2):
        lost: list[SampleRef] = []
        last = attempt == max_retries + 1

        async def draw(
            ref: SampleRef,
            attempt: int = attempt,
            last: bool = last,
            lost: list[SampleRef] = lost,
        ) -> None:
            sample = await _draw(suite.task(environments, ref), ref, collect, attempt)
            if sample.outcome is Outcome.INVALID_INFRA and not last:
                lost.append(ref)
                return
            final[_key(ref)] = sample
            if on_sample is not None:
                on_sample(sample)

        await _each(todo, draw, max_concurrent)
        todo = sorted(lost, key=_key)
    return EvaluationResult(
        label=label, suite=suite, samples=tuple(final[_key(ref)] for ref in suite.samples())
    )


async def _each(
    refs: Iterable[SampleRef],
    draw: Callable[[SampleRef], Awaitable[None]],
    max_concurrent: int,
) -> None:
    """Apply `draw` to all with so many workers; the first error cancels the rest."""
    queue: Iterator[SampleRef] = iter(refs)

    async def work() -> None:
        for ref in queue:
            await draw(ref)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(max_concurrent):
                group.create_task(work())
    except ExceptionGroup as errors:
        # The first one is what went wrong; the group around it would hide a user's mistake.
        raise errors.exceptions[0] from errors


async def _draw(task: Task, ref: SampleRef, collect: Collect, attempt: int) -> SampleResult:
    try:
        rollout = await collect(task, ref.seed)
    except ClassifiedFailure as error:
        return _failed(ref, error.failure, attempt)
    verdict = rollout.verdict
    return SampleResult(
        domain=ref.domain,
        index=ref.index,
        sample=ref.sample,
        outcome=verdict.outcome,
        passed=verdict.passed,
        score=verdict.score,
        num_sampled_tokens=rollout.num_sampled_tokens,
        stop_reason=rollout.turns[-1].stop_reason if rollout.turns else None,
        num_attempts=attempt,
        failure=verdict.failure,
    )


def _failed(ref: SampleRef, failure: Failure, attempt: int) -> SampleResult:
    """A failure of the policy is a failed answer; all others leave the sample without a score."""
    policy = failure.kind is FailureKind.POLICY
    return SampleResult(
        domain=ref.domain,
        index=ref.index,
        sample=ref.sample,
        outcome=_OUTCOMES[failure.kind],
        passed=False if policy else None,
        score=0.0 if policy else None,
        num_sampled_tokens=0,
        stop_reason=None,
        num_attempts=attempt,
        failure=None if policy else failure,
    )


_OUTCOMES = {
    FailureKind.INFRA: Outcome.INVALID_INFRA,
    FailureKind.SANDBOX: Outcome.INVALID_INFRA,
    FailureKind.VERIFIER: Outcome.INVALID_INFRA,
    FailureKind.ENVIRONMENT: Outcome.INVALID_ENVIRONMENT,
    FailureKind.DATA: Outcome.INVALID_ENVIRONMENT,
    FailureKind.POLICY: Outcome.SCORED,
}


def _key(ref: SampleRef) -> tuple[str, int, int]:
    return (ref.domain, ref.index, ref.sample)
