"""The end of a run in the terminal."""

from typing import Any

import pytest

from burnish.cli.summary import show_result


def result(**changes: Any) -> dict[str, Any]:
    row = {
        "n": 64,
        "before": 0.1,
        "warmed": 0.4,
        "after": 0.5,
        "diff": 0.4,
        "ci_low": 0.3,
        "ci_high": 0.5,
        "rl_diff": 0.1,
        "rl_ci_low": -0.1,
        "rl_ci_high": 0.2,
    }
    values: dict[str, Any] = {
        "run_dir": "runs/x",
        "model": "runs/x/model",
        "domains": {"sums": row},
        "mean": {"diff": 0.4, "ci_low": 0.3, "ci_high": 0.5},
        "ledger": {"dispatched": 8, "trained": 8, "in_flight": 0, "dropped": {}},
        "quarantined": {},
    }
    return values | changes


def lines(capsys: pytest.CaptureFixture[str], value: dict[str, Any]) -> list[str]:
    show_result(value)
    return [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]


def test_the_table_tells_the_warm_ups_part_from_that_of_reinforcement_learning(
    capsys: pytest.CaptureFixture[str],
) -> None:
    shown = lines(capsys, result())
    assert any(line.startswith("held-out tasks before warmed after") for line in shown)
    expected = "sums 64 10.0% 40.0% 50.0% +40.0 [+30.0, +50.0] +10.0 [-10.0, +20.0]"
    assert expected in shown
    assert "of which reinforcement learning: +10.0" in shown


def test_the_mean_of_reinforcement_learning_has_its_interval_where_the_run_gave_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    mean = {"diff": 0.4, "ci_low": 0.3, "ci_high": 0.5}
    mean |= {"rl_diff": 0.1, "rl_ci_low": 0.05, "rl_ci_high": 0.15}
    shown = lines(capsys, result(mean=mean))
    assert "of which reinforcement learning: +10.0 [+5.0, +15.0]" in shown


def test_a_domain_lost_in_the_run_shows_dashes_and_its_quarantine(
    capsys: pytest.CaptureFixture[str],
) -> None:
    row = dict.fromkeys(result()["domains"]["sums"]) | {"n": 0, "before": 0.1}
    gone = result(domains={"gone": row}, quarantined={"gone": "it broke"})
    shown = lines(capsys, gone)
    assert "gone 0 10.0% - -" in shown
    assert "quarantined gone: it broke" in shown


def test_a_run_without_any_gradient_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    line = "no step had a gradient: the model is unchanged since the warm-up"
    assert line not in lines(capsys, result())
    ledger = {"dispatched": 8, "trained": 0, "in_flight": 0, "dropped": {"zero_variance": 8}}
    assert line in lines(capsys, result(ledger=ledger))
