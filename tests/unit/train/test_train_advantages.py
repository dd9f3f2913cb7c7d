"""Credit: who gets what, and who gets nothing."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from burnish.core.records import CreditSpan, Failure, Group, Rollout, Turn, Verdict
from burnish.core.vocabulary import CreditSource, FailureKind, Outcome, StopReason
from burnish.train.advantages import RunningScale, group_to_sequences

PROMPT = (5, 6, 7, 8)


def outcome(value: float, start: int, end: int, weight: float = 1.0) -> CreditSpan:
    return CreditSpan(source=CreditSource.OUTCOME, value=value, weight=weight, start=start, end=end)


def rollout(
    sample: int,
    score: float | None,
    spans: tuple[CreditSpan, ...] | None = None,
    *,
    prompt: tuple[int, ...] = PROMPT,
    num_sampled: int = 3,
    stop: StopReason = StopReason.STOP,
) -> Rollout:
    start, end = len(prompt), len(prompt) + num_sampled
    scored = score is not None
    if spans is None:
        spans = (outcome(score, start, end),) if score is not None else ()
    failure = Failure(kind=FailureKind.SANDBOX, where="here", message="gone")
    return Rollout(
        rollout_id=f"d/0/{sample}",
        group_id="d/0",
        domain="d",
        environment_digest="sha256:0",
        token_ids=(*prompt, *(100 + sample + i for i in range(num_sampled))),
        num_prompt_tokens=len(prompt),
        sampled_mask=(False,) * len(prompt) + (True,) * num_sampled,
        logprobs=(0.0,) * len(prompt) + (-1.0,) * num_sampled,
        weight_versions=(-1,) * len(prompt) + (0,) * num_sampled,
        turns=(Turn(start=start, end=end, stop_reason=stop),) if num_sampled else (),
        messages=(),
        verdict=Verdict(
            outcome=Outcome.SCORED if scored else Outcome.INVALID_INFRA,
            score=score,
            passed=None if score is None else score == 1.0,
            failure=None if scored else failure,
        ),
        spans=spans,
        seed=0,
        duration_s=0.0,
    )


def group(*rollouts: Rollout) -> Group:
    return Group(group_id="d/0", domain="d", index=0, dispatched_version=0, rollouts=rollouts)


def unit_scale() -> RunningScale:
    """A scale of exactly 1."""
    return RunningScale(floor=1.0)


@given(st.lists(st.floats(0, 1), min_size=2, max_size=12))
def test_leave_one_out_is_score_minus_mean_of_the_others(scores):
    rollouts = [rollout(i, s) for i, s in enumerate(scores)]
    credit = group_to_sequences(group(*rollouts), unit_scale())
    for i, sequence in enumerate(credit.sequences):
        others = [s for j, s in enumerate(scores) if j != i]
        wanted = scores[i] - sum(others) / len(others)
        for advantage, masked in zip(sequence.advantages, sequence.loss_mask, strict=True):
            assert advantage == pytest.approx(wanted if masked else 0.0, abs=1e-9)


def test_each_source_has_its_own_baseline_and_lands_on_its_own_tokens():
    def both(sample: int, right: float, form: float) -> Rollout:
        process = CreditSpan(source=CreditSource.PROCESS, value=form, weight=0.3, start=4, end=5)
        return rollout(sample, 0.5, (outcome(right, 4, 7, 0.6), process))

    members = (both(0, 1.0, 0.0), both(1, 0.0, 1.0), both(2, 0.0, 0.0))
    first = group_to_sequences(group(*members), unit_scale()).sequences[0]
    assert first.advantages == pytest.approx((0, 0, 0, 0, 0.6 * 1.0 + 0.3 * (0 - 0.5), 0.6, 0.6))


def test_unscored_rollouts_are_in_no_baseline_and_no_sequence():
    with_failure = group(rollout(0, 1.0), rollout(1, None), rollout(2, 0.0))
    without = group(rollout(0, 1.0), rollout(2, 0.0))
    credit = group_to_sequences(with_failure, unit_scale())
    assert credit.sequences == group_to_sequences(without, unit_scale()).sequences
    assert credit.num_invalid == 1


@pytest.mark.parametrize("score", [0.0, 0.1, 1.0])
def test_equal_scores_are_flagged_and_exactly_zero(score):
    credit = group_to_sequences(group(*(rollout(i, score) for i in range(7))), RunningScale())
    assert credit.zero_variance
    assert all(a == 0.0 for s in credit.sequences for a in s.advantages)


def test_equal_scores_with_different_credit_still_teach():
    process = CreditSpan(source=CreditSource.PROCESS, value=1.0, weight=0.5, start=4, end=7)
    nothing = CreditSpan(source=CreditSource.PROCESS, value=0.0, weight=0.5, start=4, end=7)
    members = (
        rollout(0, 0.5, (outcome(1.0, 4, 7, 0.5), nothing)),
        rollout(1, 0.5, (outcome(0.0, 4, 7, 0.5), process)),
    )
    spread = (rollout(0, 0.5, (outcome(1.0, 4, 6, 0.5), nothing)), members[1])
    assert group_to_sequences(group(*members), unit_scale()).zero_variance
    assert not group_to_sequences(group(*spread), unit_scale()).zero_variance


@pytest.mark.parametrize("members", [(), (rollout(0, 1.0),), (rollout(0, 1.0), rollout(1, None))])
def test_fewer_than_two_scored_rollouts_give_nothing(members):
    credit = group_to_sequences(group(*members), RunningScale())
    assert credit.sequences == ()
    assert not credit.zero_variance


def test_a_source_that_only_one_rollout_has_gives_no_credit():
    process = CreditSpan(source=CreditSource.PROCESS, value=1.0, weight=0.4, start=4, end=7)
    members = (rollout(0, 1.0, (process,)), rollout(1, 0.0, ()))
    assert group_to_sequences(group(*members), unit_scale()).zero_variance


def test_tokens_of_an_aborted_turn_are_not_trained():
    members = (rollout(0, 1.0, stop=StopReason.ABORTED), rollout(1, 0.0))
    credit = group_to_sequences(group(*members), unit_scale())
    assert [s.token_ids for s in credit.sequences] == [members[1].token_ids]


def test_a_scored_rollout_without_sampled_tokens_counts_in_the_baseline_only():
    members = (rollout(0, 0.0, (outcome(0.0, 4, 4),), num_sampled=0), rollout(1, 1.0))
    credit = group_to_sequences(group(*members), unit_scale())
    assert len(credit.sequences) == 1
    assert credit.sequences[0].advantages[-1] == 1.0


def test_prefix_is_the_common_part_and_never_leaves_the_prompt():
    same = group(rollout(0, 1.0), rollout(0, 0.0))
    assert all(s.num_prefix_tokens == 4 for s in group_to_sequences(same, unit_scale()).sequences)
    forked = group(rollout(0, 1.0), rollout(1, 0.0, prompt=(5, 6, 9, 8)))
    assert all(s.num_prefix_tokens == 2 for s in group_to_sequences(forked, unit_scale()).sequences)


def test_group_normaliser_divides_by_the_deviation_of_the_group():
    members = [rollout(i, s) for i, s in enumerate((1.0, 0.0, 0.0, 0.0))]
    credit = group_to_sequences(group(*members), RunningScale(), normaliser="group")
    assert credit.sequences[0].advantages[-1] == pytest.approx(1.0 / (0.5 + 1e-6))


def test_the_divisor_does_not_depend_on_the_group_that_it_divides():
    scale = RunningScale()
    before = scale.scale("d")
    credit = group_to_sequences(group(rollout(0, 1.0), rollout(1, 0.0)), scale)
    assert credit.sequences[0].advantages[-1] == 1.0 / before


def test_scale_converges_to_the_deviation_of_the_domain():
    scale = RunningScale(decay=0.9)
    for _ in range(300):
        scale.observe("d", [1.0, 0.0, 0.0, 0.0])
    assert scale.scale("d") == pytest.approx(math.sqrt(0.25 * 0.75))


@given(st.lists(st.lists(st.floats(0, 1), max_size=6), max_size=30))
def test_scale_stays_between_its_floor_and_the_largest_deviation(groups):
    scale = RunningScale(floor=0.1)
    for scores in groups:
        scale.observe("d", scores)
        assert 0.1 <= scale.scale("d") <= math.sqrt(0.5)


@given(st.lists(st.floats(0, 1), min_size=1), st.lists(st.floats(0, 1), min_size=1))
def test_scale_goes_on_from_its_state(first, second):
    whole, half = RunningScale(), RunningScale()
    for scale in (whole, half):
        scale.observe("d", first)
    resumed = RunningScale.from_state(half.state())
    for scale in (whole, resumed):
        scale.observe("d", second)
    assert resumed.state() == whole.state()
