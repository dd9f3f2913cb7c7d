from burnish.core.records import Credit, Failure, Group, Rollout, Turn, Verdict
from burnish.core.vocabulary import CreditSource, DropReason, FailureKind, Outcome, StopReason
from burnish.envs.rewards import compose
from burnish.rollout.agent.episode import credit_spans
from burnish.run.batch import computed_tokens, drop_reason, make_batch
from burnish.train.advantages import RunningScale


def rollout(sample, value):
    """A rollout of two prompt and three sampled tokens; None is one that could not be judged."""
    turns = (Turn(start=2, end=5, stop_reason=StopReason.STOP),)
    if value is None:
        failure = Failure(kind=FailureKind.SANDBOX, where="x", message="y")
        verdict = Verdict(outcome=Outcome.INVALID_INFRA, score=None, passed=None, failure=failure)
    else:
        verdict = compose((Credit(source=CreditSource.OUTCOME, value=value),), {})
    sampled = value is not None
    return Rollout(
        rollout_id=f"d/0/{sample}",
        group_id="d/0",
        domain="d",
        environment_digest="sha256:0",
        token_ids=(1, 2, 3, 4, 5) if sampled else (1, 2),
        num_prompt_tokens=2,
        sampled_mask=(False, False, True, True, True) if sampled else (False, False),
        logprobs=(0.0, 0.0, -1.0, -1.0, -1.0) if sampled else (0.0, 0.0),
        weight_versions=(-1, -1, 1, 1, 1) if sampled else (-1, -1),
        turns=turns if sampled else (),
        messages=(),
        verdict=verdict,
        spans=credit_spans(verdict, turns) if sampled else (),
        seed=0,
        duration_s=0.0,
    )


def group(*values):
    rollouts = tuple(rollout(n, v) for n, v in enumerate(values))
    return Group(group_id="d/0", domain="d", index=0, dispatched_version=1, rollouts=rollouts)


def test_a_group_needs_two_scores_that_differ():
    assert drop_reason(group(0.0, 1.0)) is None
    assert drop_reason(group(1.0, 1.0)) is DropReason.ZERO_VARIANCE
    assert drop_reason(group(1.0, None)) is DropReason.INVALID
    assert drop_reason(group(None, None)) is DropReason.INVALID
    assert drop_reason(group(0.0, 1.0, None)) is None


def test_the_unscored_enter_no_sequence_no_baseline_and_are_counted():
    with_failure = make_batch([group(0.0, None, 1.0)], RunningScale())
    without = make_batch([group(0.0, 1.0)], RunningScale())
    assert with_failure.num_invalid == {"d/0": 1}
    assert [s.advantages for s in with_failure.sequences] == [
        s.advantages for s in without.sequences
    ]
    assert set(with_failure.advantages) == {"d/0/0", "d/0/2"}
    assert sum(map(sum, with_failure.advantages.values())) == 0.0


def test_a_group_costs_its_prompt_once_and_every_continuation():
    assert computed_tokens(group(0.0, 1.0, None)) == 2 + 3 + 3
