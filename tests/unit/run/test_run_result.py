from burnish.core.vocabulary import Outcome, StopReason
from burnish.evaluate.result import EvaluationResult, SampleResult
from burnish.evaluate.suite import SamplingPlan, Suite
from burnish.run.result import domain_table, worked_seconds
from burnish.telemetry.events import Event, EventKind


def event(t, kind):
    return Event(t=t, kind=kind, step=0)


def test_wall_time_adds_up_sessions_and_leaves_out_the_pauses():
    events = [
        event(10.0, EventKind.RUN_STARTED),
        event(14.0, EventKind.STEP_FINISHED),
        event(100.0, EventKind.RUN_RESUMED),
        event(101.5, EventKind.RUN_FINISHED),
    ]
    assert worked_seconds(events) == 5.5
    assert worked_seconds([]) == 0.0


def evaluation(label, **passed):
    """One held-out task per entry; None could not be scored."""
    suite = Suite(
        indices={name: tuple(range(len(values))) for name, values in passed.items()},
        environment_digests=dict.fromkeys(passed, "sha256:0"),
        plan=SamplingPlan(),
    )
    samples = tuple(
        SampleResult(
            domain=name,
            index=index,
            sample=0,
            outcome=Outcome.INVALID_INFRA if value is None else Outcome.SCORED,
            passed=value,
            score=None if value is None else float(value),
            num_sampled_tokens=1,
            stop_reason=StopReason.STOP,
            num_attempts=1,
        )
        for name, values in passed.items()
        for index, value in enumerate(values)
    )
    return EvaluationResult(label=label, suite=suite, samples=samples)


def test_a_domain_that_could_not_be_scored_has_no_figures():
    before = evaluation("before", good=(False,) * 8, lost=(True,) * 8)
    after = evaluation("after", good=(True,) * 8, lost=(None,) * 8)
    table = domain_table({"before": before, "after": after})
    assert table["good"]["diff"] == 1.0
    assert table["lost"]["n"] == 0
    assert all(value is None for key, value in table["lost"].items() if key != "n")
    assert table["lost"].keys() == table["good"].keys()


def test_the_part_of_rl_is_measured_against_the_warmed_model():
    results = {
        "before": evaluation("before", d=(False, False, False, False)),
        "warmed": evaluation("warmed", d=(True, True, False, False)),
        "after": evaluation("after", d=(True, True, True, False)),
    }
    row = domain_table(results)["d"]
    assert (row["before"], row["warmed"], row["after"]) == (0.0, 0.5, 0.75)
    assert (row["diff"], row["rl_diff"]) == (0.75, 0.25)
