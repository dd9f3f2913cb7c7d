import asyncio
import random
from collections import Counter

import pytest

from burnish.core.errors import ClassifiedFailure, UserError
from burnish.core.records import Failure, Message, Rollout, Task, Turn, Verdict
from burnish.core.vocabulary import FailureKind, Outcome, Split, StopReason
from burnish.evaluate.runner import evaluate
from burnish.evaluate.suite import SuiteConfig, build_suite


class FakeEnvironment:
    tools = ()
    description = "For tests."

    def __init__(self, name, digest="sha256:0"):
        self.name = name
        self.digest = digest

    def task(self, split, index):
        return Task(
            domain=self.name,
            split=split,
            index=index,
            prompt=(Message(role="user", content=str(index)),),
            payload={},
            max_tokens=8,
        )

    async def start(self, task, context):
        raise NotImplementedError

    def reference(self, task):
        return ()


def rollout(task, seed, passed=True, outcome=Outcome.SCORED):
    scored = outcome is Outcome.SCORED
    failure = None if scored else Failure(kind=FailureKind.INFRA, where="t", message="m")
    return Rollout(
        rollout_id="r",
        group_id="g",
        domain=task.domain,
        environment_digest="sha256:0",
        token_ids=(1, 2, 3),
        num_prompt_tokens=1,
        sampled_mask=(False, True, True),
        logprobs=(0.0, -1.0, -1.0),
        weight_versions=(-1, 0, 0),
        turns=(Turn(start=1, end=3, stop_reason=StopReason.LENGTH),),
        messages=task.prompt,
        verdict=Verdict(
            outcome=outcome,
            score=1.0 if scored else None,
            passed=passed if scored else None,
            failure=failure,
        ),
        spans=(),
        seed=seed,
        duration_s=0.0,
    )


ENVIRONMENTS = {name: FakeEnvironment(name) for name in ("a", "b")}


def run(collect, config=None, **options):
    suite = build_suite(ENVIRONMENTS, config or SuiteConfig(num_tasks=6))
    options = {"label": "x", "max_concurrent": 3, **options}
    return asyncio.run(evaluate(suite, ENVIRONMENTS, collect, **options))


def failing(kind):
    return ClassifiedFailure(Failure(kind=kind, where="test", message="broken"))


def test_every_sample_is_drawn_once_from_held_out_tasks_in_canonical_order():
    seen = Counter()

    async def collect(task, seed):
        assert task.split is Split.HELD_OUT
        seen[task.domain, task.index, seed] += 1
        for _ in range(random.Random(seed).randrange(5)):
            await asyncio.sleep(0)
        return rollout(task, seed)

    result = run(collect, SuiteConfig(num_tasks=5, num_samples=2, temperature=1.0))
    keys = [(s.domain, s.index, s.sample) for s in result.samples]
    assert keys == [(d, i, k) for d in ("a", "b") for i in range(5) for k in range(2)]
    assert set(seen.values()) == {1}
    assert len(seen) == 20
    assert result.samples[0].stop_reason is StopReason.LENGTH
    assert result.samples[0].num_sampled_tokens == 2


def test_no_more_episodes_run_at_once_than_allowed():
    running, most = 0, 0

    async def collect(task, seed):
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        return rollout(task, seed)

    run(collect, max_concurrent=4)
    assert most == 4


def test_infrastructure_failures_are_retried_with_the_same_seed_and_then_succeed():
    tries = Counter()

    async def collect(task, seed):
        tries[task.domain, task.index, seed] += 1
        if task.index == 2 and tries[task.domain, task.index, seed] < 3:
            raise failing(FailureKind.SANDBOX)
        return rollout(task, seed)

    result = run(collect)
    assert {s.outcome for s in result.samples} == {Outcome.SCORED}
    assert {s.num_attempts for s in result.samples if s.index == 2} == {3}
    assert {s.num_attempts for s in result.samples if s.index != 2} == {1}


def test_infrastructure_failures_that_persist_are_counted_apart():
    async def collect(task, seed):
        if task.index == 0:
            return rollout(task, seed, outcome=Outcome.INVALID_INFRA)
        if task.index == 1:
            raise failing(FailureKind.VERIFIER)
        return rollout(task, seed)

    result = run(collect, max_retries=1)
    summary = result.summary("a")
    assert (summary.num_invalid_infra, summary.num_scored, summary.pass_rate) == (2, 4, 1.0)
    lost = result.samples[1]
    assert (lost.score, lost.passed, lost.num_attempts) == (None, None, 2)
    assert lost.failure.kind is FailureKind.VERIFIER


@pytest.mark.parametrize(
    ("kind", "outcome", "passed"),
    [
        (FailureKind.ENVIRONMENT, Outcome.INVALID_ENVIRONMENT, None),
        (FailureKind.DATA, Outcome.INVALID_ENVIRONMENT, None),
        (FailureKind.POLICY, Outcome.SCORED, False),
    ],
)
def test_what_is_not_the_machines_fault_is_not_retried(kind, outcome, passed):
    calls = 0

    async def collect(task, seed):
        nonlocal calls
        calls += 1
        raise failing(kind)

    result = run(collect)
    assert calls == 12
    assert {(s.outcome, s.passed) for s in result.samples} == {(outcome, passed)}


def test_bugs_and_user_mistakes_come_out_as_they_are():
    async def collect(task, seed):
        raise UserError("No weights.", fix="load some.")

    with pytest.raises(UserError, match="No weights"):
        run(collect)


def test_an_interrupted_run_goes_on_with_what_was_final():
    first = []

    async def dies(task, seed):
        if len(first) == 7:
            raise RuntimeError("killed")
        return rollout(task, seed, passed=seed % 2 == 0)

    with pytest.raises(RuntimeError, match="killed"):
        run(dies, max_concurrent=1, on_sample=first.append)
    drawn = []

    async def collect(task, seed):
        drawn.append(seed)
        return rollout(task, seed, passed=seed % 2 == 0)

    resumed = run(collect, done=first)
    assert len(drawn) == 12 - 7
    assert resumed == run(collect)


def test_cancelling_stops_all_episodes():
    ended = []

    async def collect(task, seed):
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(seed)

    async def main():
        suite = build_suite(ENVIRONMENTS, SuiteConfig(num_tasks=6))
        job = asyncio.create_task(
            evaluate(suite, ENVIRONMENTS, collect, label="x", max_concurrent=3)
        )
        for _ in range(5):
            await asyncio.sleep(0)
        job.cancel()
        with pytest.raises(asyncio.CancelledError):
            await job

    asyncio.run(main())
    assert len(ended) == 3


def test_changed_or_missing_environments_are_refused():
    suite = build_suite(ENVIRONMENTS, SuiteConfig(num_tasks=2))

    async def collect(task, seed):
        return rollout(task, seed)

    changed = {**ENVIRONMENTS, "b": FakeEnvironment("b", "sha256:1")}
    for environments, text in ((changed, "has changed"), ({}, "not loaded")):
        with pytest.raises(UserError, match=text):
            asyncio.run(evaluate(suite, environments, collect, label="x", max_concurrent=1))


def test_repeating_greedy_samples_is_refused():
    with pytest.raises(UserError, match="same answer"):
        build_suite(ENVIRONMENTS, SuiteConfig(num_samples=4))
    with pytest.raises(UserError, match="no domain"):
        build_suite({}, SuiteConfig())


def test_seeds_differ_between_samples_and_do_not_depend_on_other_domains():
    config = SuiteConfig(num_tasks=3, num_samples=2, temperature=1.0)
    both = list(build_suite(ENVIRONMENTS, config).samples())
    alone = list(build_suite({"b": ENVIRONMENTS["b"]}, config).samples())
    assert len({r.seed for r in both}) == len(both)
    assert [r for r in both if r.domain == "b"] == alone


def test_a_suite_can_leave_out_the_tasks_that_chose_a_recipe():
    seen = build_suite(ENVIRONMENTS, SuiteConfig(num_tasks=6))
    fresh = build_suite(ENVIRONMENTS, SuiteConfig(num_tasks=6, first_task=6))
    for domain in ENVIRONMENTS:
        assert len(fresh.indices[domain]) == 6
        assert not set(fresh.indices[domain]) & set(seen.indices[domain])
    assert fresh.digest != seen.digest
