import math
import random
from fractions import Fraction

import msgspec
import pytest

from burnish.core.errors import UserError
from burnish.core.records import Failure
from burnish.core.vocabulary import FailureKind, Outcome, StopReason
from burnish.evaluate.comparison import ComparisonConfig, DifferenceVerdict, compare
from burnish.evaluate.gate import GateAction, gate
from burnish.evaluate.result import EvaluationResult, SampleResult, result_from_json
from burnish.evaluate.significance import mcnemar_exact
from burnish.evaluate.suite import SamplingPlan, Suite


def make_suite(domains, num_tasks, num_samples=1):
    return Suite(
        indices={d: tuple(range(num_tasks)) for d in domains},
        environment_digests={d: f"sha256:{d}" for d in domains},
        plan=SamplingPlan(num_samples=num_samples, temperature=0.0 if num_samples == 1 else 1.0),
    )


def make_result(suite, answer, label="model"):
    """`answer(ref)` is True, False or None for a sample lost to infrastructure."""
    samples = []
    for ref in suite.samples():
        passed = answer(ref)
        lost = passed is None
        samples.append(
            SampleResult(
                domain=ref.domain,
                index=ref.index,
                sample=ref.sample,
                outcome=Outcome.INVALID_INFRA if lost else Outcome.SCORED,
                passed=passed,
                score=None if lost else float(passed),
                num_sampled_tokens=0 if lost else 10,
                stop_reason=None if lost else StopReason.STOP,
                num_attempts=1,
                failure=Failure(kind=FailureKind.INFRA, where="x", message="x") if lost else None,
            )
        )
    return EvaluationResult(label=label, suite=suite, samples=tuple(samples))


def from_table(both, only_after, only_before, neither):
    num = both + only_after + only_before + neither
    suite = make_suite(["d"], num)
    before = [True] * both + [False] * only_after + [True] * only_before + [False] * neither
    after = [True] * both + [True] * only_after + [False] * only_before + [False] * neither
    return compare(
        make_result(suite, lambda r: before[r.index], "before"),
        make_result(suite, lambda r: after[r.index], "after"),
    )


def test_rates_and_p_value_come_from_the_paired_table():
    c = from_table(30, 25, 5, 40).domains["d"]
    assert (c.n, c.before, c.after) == (100, 0.35, 0.55)
    assert c.diff == pytest.approx(0.2)
    assert c.p_value == pytest.approx(mcnemar_exact(25, 5))
    assert c.ci_low < c.diff < c.ci_high
    assert c.ci_low < c.one_sided_low < c.diff
    assert c.verdict is DifferenceVerdict.GAIN


def test_verdicts_follow_the_evidence():
    assert from_table(20, 5, 25, 50).domains["d"].verdict is DifferenceVerdict.LOSS
    assert from_table(3, 1, 0, 1).domains["d"].verdict is DifferenceVerdict.UNDERPOWERED
    assert from_table(900, 20, 20, 60).domains["d"].verdict is DifferenceVerdict.NO_DIFFERENCE


def test_five_tasks_that_all_improved_are_not_yet_a_gain():
    c = from_table(0, 5, 0, 0).domains["d"]
    assert c.p_value == 2 / 32
    assert c.verdict is DifferenceVerdict.UNDERPOWERED


def test_equal_results_leave_room_on_both_sides():
    c = from_table(50, 0, 0, 50).domains["d"]
    assert c.ci_low < 0.0 < c.ci_high


def test_holm_takes_back_what_only_many_domains_made_significant():
    names = [f"d{i}" for i in range(10)]
    suite = make_suite(names, 60)
    before = make_result(suite, lambda r: False)
    # 6 of 60 in one domain: p = 0.031 alone, 0.31 among ten.
    after = make_result(suite, lambda r: r.domain == "d0" and r.index < 6)
    c = compare(before, after).domains["d0"]
    assert c.p_value == pytest.approx(2 / 64)
    assert c.p_holm == pytest.approx(20 / 64)
    assert c.verdict is not DifferenceVerdict.GAIN


def test_unpaired_suites_are_refused():
    one = make_result(make_suite(["d"], 10), lambda r: True, "one")
    other = make_result(make_suite(["d"], 11), lambda r: True, "other")
    with pytest.raises(UserError, match="different suites"):
        compare(one, other)
    half = EvaluationResult(label="half", suite=one.suite, samples=one.samples[:5])
    with pytest.raises(UserError, match="finish that evaluation"):
        compare(one, half)


def test_changed_environment_changes_the_digest():
    suite = make_suite(["d"], 3)
    changed = msgspec.structs.replace(suite, environment_digests={"d": "sha256:other"})
    assert suite.digest != changed.digest
    assert suite.digest == make_suite(["d"], 3).digest


def test_samples_lost_to_infrastructure_leave_the_pairs_and_are_counted():
    suite = make_suite(["d"], 50)
    before = make_result(suite, lambda r: None if r.index < 5 else False)
    after = make_result(suite, lambda r: None if r.index >= 45 else True)
    c = compare(before, after).domains["d"]
    assert (c.n, c.num_unpaired, c.before, c.after) == (40, 10, 0.0, 1.0)
    summary = before.summary("d")
    assert (summary.num_scored, summary.num_invalid_infra) == (45, 5)


def test_both_denominators_are_reported():
    suite = make_suite(["d"], 10)
    result = make_result(suite, lambda r: None if r.index < 5 else True)
    summary = result.summary("d")
    assert summary.pass_rate == 1.0
    assert summary.strict_pass_rate == 0.5
    assert summary.pass_low < 1.0 == summary.pass_high


def test_a_domain_that_lost_everything_concludes_nothing():
    suite = make_suite(["d", "e"], 10)
    lost = make_result(suite, lambda r: None if r.domain == "d" else True)
    c = compare(lost, lost)
    assert (c.domains["d"].n, c.domains["d"].verdict) == (0, DifferenceVerdict.UNDERPOWERED)
    assert (c.domains["d"].ci_low, c.domains["d"].ci_high) == (-1.0, 1.0)
    assert gate(c, 0.2).domains["d"].action is GateAction.UNDERPOWERED


def test_several_samples_are_averaged_within_their_task():
    suite = make_suite(["d"], 40, num_samples=4)
    before = make_result(suite, lambda r: r.sample < r.index % 3)
    after = make_result(suite, lambda r: r.sample < r.index % 3 + 1)
    c = compare(before, after).domains["d"]
    assert c.diffs == (0.25,) * 40
    assert c.diff == pytest.approx(0.25)
    assert c.verdict is DifferenceVerdict.GAIN
    assert before.summary("d").pass_at_k == pytest.approx(float(Fraction(26, 40)))


def test_result_survives_json_and_damage_is_refused():
    result = make_result(make_suite(["d"], 3, 2), lambda r: r.sample == 0)
    data = result.to_json()
    assert result_from_json(data, "eval.json") == result
    for bad in (data[: len(data) // 2], b"", b"[]", b'{"format_version": 1}'):
        with pytest.raises(UserError, match="not an evaluation result"):
            result_from_json(bad, "eval.json")
    with pytest.raises(UserError, match="format version 7"):
        result_from_json(data.replace(b'"format_version":1', b'"format_version":7'), "eval.json")


def coin(rng, rate, noise):
    """Two answers to one task, equally good, that disagree with chance about `noise`."""
    base = rng.random() < rate
    return [base if rng.random() > noise else rng.random() < rate for _ in range(2)]


@pytest.mark.parametrize(
    ("num_samples", "runs"), [(1, 150), pytest.param(3, 100, marks=pytest.mark.slow)]
)
def test_comparing_a_model_with_itself_raises_no_more_false_alarms_than_stated(num_samples, runs):
    rng = random.Random(0)
    suite = make_suite(["a", "b", "c"], 40, num_samples)
    alarms = gate_alarms = 0
    for _ in range(runs):
        answers = {(r.domain, r.index, r.sample): coin(rng, 0.4, 0.5) for r in suite.samples()}
        first, second = (
            make_result(suite, lambda r, i=i, a=answers: a[r.domain, r.index, r.sample][i])
            for i in range(2)
        )
        comparison = compare(first, second)
        alarms += any(
            c.verdict in (DifferenceVerdict.GAIN, DifferenceVerdict.LOSS)
            for c in comparison.domains.values()
        )
        gate_alarms += gate(comparison, 0.1).action in (
            GateAction.ROLL_BACK,
            GateAction.RAISE_FLOOR,
        )
    limit = 0.05 + 3 * math.sqrt(0.05 * 0.95 / runs)
    assert alarms / runs <= limit
    assert gate_alarms / runs <= limit


def test_mean_difference_over_domains_covers_the_truth():
    rng = random.Random(1)
    suite = make_suite(["a", "b", "c", "d"], 40)
    gains = {"a": 0.3, "b": 0.1, "c": 0.0, "d": 0.2}
    runs, hits = 100, 0
    for _ in range(runs):
        before = make_result(suite, lambda r: rng.random() < 0.3)
        after = make_result(suite, lambda r: rng.random() < 0.3 + gains[r.domain])
        c = compare(before, after)
        hits += c.mean_ci_low <= 0.15 <= c.mean_ci_high
    assert hits / runs >= 0.95 - 3 * math.sqrt(0.95 * 0.05 / runs)


@pytest.mark.parametrize(
    ("table", "margin", "action"),
    [
        ((900, 20, 20, 60), 0.05, GateAction.PROMOTE),
        ((30, 25, 5, 40), 0.05, GateAction.PROMOTE),
        ((20, 5, 5, 20), 0.05, GateAction.UNDERPOWERED),
        ((900, 5, 25, 70), 0.05, GateAction.RAISE_FLOOR),
        ((20, 5, 25, 50), 0.05, GateAction.ROLL_BACK),
    ],
)
def test_gate_decides_by_what_is_shown(table, margin, action):
    decision = gate(from_table(*table), margin)
    assert decision.action is action
    assert decision.domains["d"].action is action


def test_the_worst_domain_decides():
    suite = make_suite(["good", "bad"], 100)
    before = make_result(suite, lambda r: r.domain == "bad")
    after = make_result(suite, lambda r: r.domain == "good")
    assert gate(compare(before, after), 0.05).action is GateAction.ROLL_BACK


def test_a_larger_effect_of_interest_needs_fewer_tasks():
    suite = make_suite(["d"], 100)
    same = make_result(suite, lambda r: r.index % 2 == 0)
    strict = compare(same, same, ComparisonConfig(min_effect=0.01)).domains["d"]
    loose = compare(same, same, ComparisonConfig(min_effect=0.2)).domains["d"]
    assert strict.verdict is DifferenceVerdict.UNDERPOWERED
    assert loose.verdict is DifferenceVerdict.NO_DIFFERENCE
