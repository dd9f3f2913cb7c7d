"""`burnish top`: the same rows from a live run's answer and from a run's records."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from burnish.cli.main import main
from burnish.cli.top import picture
from burnish.cli.top_layout import Fit
from burnish.cli.top_rows import domain_cells, headlines
from burnish.core.clock import ManualClock
from burnish.observe.standing import live_standing, recorded_standing
from burnish.store.manifest import Manifest
from burnish.store.reader import RunReader
from burnish.store.run_directory import RunDirectory
from burnish.telemetry import catalogue as metric
from burnish.telemetry.events import EventKind
from burnish.telemetry.metrics import Sample

CONFIG = "[run]\nsteps = 5  # default\n"


def status(**changes):
    def row(name, share):
        return {
            "domain": name, "share": share, "cost_ratio": 0.5, "pass_rate": None,
            "gain_per_cost": 2e-6, "wait_picks": 3, "max_gap_picks": 9, "quarantined": None,
        }  # fmt: skip

    return {
        "step": 2,
        "num_steps": 5,
        "paused": False,
        "groups": {"running": 4, "waiting": 1},
        "domains": [row("a", 0.25), row("b", 0.75)],
        "why": {"a": "25.0% of cost: floor 5.0%; waits at most 9 groups", "b": "75.0% of cost: x"},
        "items": {"a": "1 of 3 tiers open"},
        "figures": {"engine_tokens_per_s": 900.0, "engine_busy_ratio": 0.75},
        "engine": {"running": 12, "waiting": 0},
        "breakers": [],
        "flow": {"load_target": 0.95},
    } | changes


@pytest.fixture
def run(tmp_path: Path) -> Path:
    manifest = Manifest(
        burnish_version="0", created_at="2026-01-01T00:00:00+00:00", seed=1, versions={},
        hardware={}, model_digest="sha256:0", environments={},
    )  # fmt: skip
    path = tmp_path / "run"
    with RunDirectory.create(path, manifest, "", CONFIG, ManualClock()) as directory:
        directory.events.emit(EventKind.RUN_STARTED, 0)
        for step in (1, 2):
            samples = [
                Sample(name=metric.STEP_SECONDS.name, label="", value=2.0),
                Sample(name=metric.ENGINE_TOKENS_PER_S.name, label="", value=900.0),
                Sample(name=metric.ENGINE_BUSY_RATIO.name, label="", value=0.75),
                Sample(name=metric.DOMAIN_SHARE.name, label="b", value=0.75),
                Sample(name=metric.DOMAIN_MAX_GAP.name, label="b", value=9),
            ]
            if step == 1:
                samples.append(Sample(name=metric.DOMAIN_SHARE.name, label="gone", value=0.25))
            directory.metrics.append(step, samples)
            directory.events.emit(
                EventKind.SHARES_DECIDED, step, why={"b": f"75.0% of cost: s{step}"},
                items={}, rows={"b": {"cost_ratio": 0.5, "gain_per_cost": 2e-6, "wait_picks": 3}},
            )  # fmt: skip
        directory.events.emit(EventKind.BREAKER_OPENED, 2, domain="b", cause="sandbox")
    return path


def test_the_greatest_share_comes_first_and_says_why():
    standing = live_standing(status())
    assert [d.domain for d in standing.domains] == ["b", "a"]
    cells = domain_cells(standing.domains[1])
    assert cells[:6] == ("a", "25.0%", "50.0%", "-", "+2.0e-06", "3 of 9")
    assert cells[6] == "ok"
    assert cells[7] == "floor 5.0%; waits at most 9 groups; 1 of 3 tiers open"


def test_load_idle_time_and_speed_stand_above():
    first, second = headlines(live_standing(status()))
    assert "training, step 2 of 5" in first
    assert "engine 900 tok/s, idle 25%" in first
    assert "trainer" not in first
    assert "12 requests decoding, 0 waiting" in second
    assert "target 0.95" in second
    assert headlines(live_standing(status(paused=True)))[0].startswith("paused")


def test_an_open_breaker_and_a_quarantine_are_told():
    row = {"domain": "a", "image": "py", "kind": "sandbox", "retry_in_s": 12.0, "num_opened": 1}
    opened = live_standing(status(breakers=[row | {"state": "open"}])).domains[1]
    assert domain_cells(opened)[6] == "open: sandbox py, 12 s"
    closed = live_standing(status(breakers=[row | {"state": "closed"}])).domains[1]
    assert domain_cells(closed)[6] == "ok"
    rows = status()["domains"]
    rows[0]["quarantined"] = "its verifier raises"
    shut = live_standing(status(domains=rows)).domains[1]
    assert domain_cells(shut)[6] == "quarantined: its verifier raises"


def test_records_give_the_rows_that_the_live_run_gave(run):
    standing = recorded_standing(RunReader(run))
    (row,) = standing.domains
    live = live_standing(status()).domains[0]
    assert (row.domain, row.share, row.cost_ratio, row.gain_per_cost, row.wait, row.bound) == (
        live.domain, live.share, live.cost_ratio, live.gain_per_cost, live.wait, live.bound,
    )  # fmt: skip
    assert row.why == "75.0% of cost: s2"
    assert row.breaker == "opened 1x"
    assert (standing.step, standing.num_steps, standing.engine_idle) == (2, 5, 0.25)
    assert not standing.is_live


def test_a_dead_run_is_not_called_training(run):
    killed = recorded_standing(RunReader(run))
    assert headlines(killed) == [
        "killed, step 2 of 5",
        f"go on with: burnish run --resume {run}",
    ]
    with RunDirectory.open(run, ManualClock()) as directory:
        assert headlines(recorded_standing(RunReader(run)))[0].startswith("busy, step 2")
        directory.events.emit(EventKind.RUN_INTERRUPTED, 2)
    stopped = headlines(recorded_standing(RunReader(run)))
    assert stopped[0] == "stopped, step 2 of 5", "no rates of what does not run"
    assert "--resume" in stopped[1]
    with RunDirectory.open(run, ManualClock()) as directory:
        directory.events.emit(EventKind.RUN_FAILED, 2, reason="the loss is nan")
    assert headlines(recorded_standing(RunReader(run)))[1:] == ["the loss is nan"]


def test_a_paused_run_has_no_speed_and_a_trainers_speed_says_when():
    figures = {"engine_tokens_per_s": 900.0, "trainer_tokens_per_s": 50.0}
    assert "tok/s" not in headlines(live_standing(status(paused=True, figures=figures)))[0]
    line = headlines(live_standing(status(figures=figures)))[0]
    assert "trainer 50 tok/s while it computes" in line


def test_off_a_terminal_lines_fit_the_columns_asked_for_and_end_without_blanks(
    run, capsys, monkeypatch
):
    for columns, width in (("60", 60), ("", 200), ("-1", 200)):
        monkeypatch.setenv("COLUMNS", columns)
        with pytest.raises(SystemExit):
            main(("top", str(run)))
        lines = capsys.readouterr().out.splitlines()
        assert max(map(len, lines)) <= width
        assert lines == [line.rstrip() for line in lines]


def test_the_verb_prints_a_table_or_one_object(run, capsys):
    with pytest.raises(SystemExit) as ended:
        main(("top", str(run)))
    assert not ended.value.code
    shown = capsys.readouterr().out
    assert "step 2 of 5" in shown
    assert "gain/cost" in shown
    assert "75.0%" in shown
    with pytest.raises(SystemExit):
        main(("top", str(run), "--json"))
    found = json.loads(capsys.readouterr().out)
    assert found["domains"][0]["domain"] == "b"
    assert found["jobs"] == []


def test_what_is_no_run_is_one_line_with_a_fix(tmp_path, capsys):
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(SystemExit) as ended:
            main(("top", str(path)))
        assert ended.value.code == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert "Fix:" in line


def test_a_socket_that_nobody_serves_does_not_hide_the_records(run, capsys):
    (run / "control.sock").touch()
    with pytest.raises(SystemExit) as ended:
        main(("top", str(run), "--once"))
    assert not ended.value.code
    assert "step 2 of 5" in capsys.readouterr().out


def test_what_a_model_wrote_does_not_reach_the_terminal_as_control_characters(run, capsys):
    with RunDirectory.open(run, ManualClock()) as directory:
        directory.events.emit(
            EventKind.ENVIRONMENT_QUARANTINED, 2, domain="b", reason="bad \x1b[2J end"
        )
    with pytest.raises(SystemExit):
        main(("top", str(run)))
    assert "\x1b" not in capsys.readouterr().out


def crowd(num: int) -> dict:
    rows = []
    for n in range(num):
        rows.append(status()["domains"][0] | {"domain": f"domain-{n:03}", "share": 1 / (n + 2)})
    why = {row["domain"]: f"{row['share']:.1%} of cost: " + "many words " * 20 for row in rows}
    rows[-1]["quarantined"] = "its verifier raises"
    return status(domains=rows, why=why)


def job(n: int) -> dict:
    return {
        "spec": {"job_id": f"job-{n}", "tenant": "default", "units": 1},
        "state": "queued", "is_guest": False, "lent": 0,
    }  # fmt: skip


def screen(num_domains: int, num_jobs: int, width: int, height: int, **options) -> list[str]:
    console = Console(
        file=io.StringIO(), width=width, height=height, force_terminal=True, color_system=None
    )
    jobs = [job(n) for n in range(num_jobs)]
    shown = picture(live_standing(crowd(num_domains)), jobs, Fit(console, **options))
    console.print(shown)
    return console.file.getvalue().splitlines()


@pytest.mark.parametrize(
    ("width", "height", "num_jobs", "least"),
    [(80, 24, 0, 18), (80, 24, 30, 10), (200, 60, 0, 54), (200, 60, 30, 36), (40, 10, 0, 2)],
)
def test_a_screen_has_one_line_for_each_domain_and_counts_the_others(
    width, height, num_jobs, least
):
    lines = screen(100, num_jobs, width, height)
    assert len(lines) <= height - 1, "the cursor has the last line"
    assert max(map(len, lines)) <= width
    shown = [line for line in lines if line.startswith("domain-")]
    assert len(shown) >= least
    assert [line.split()[0] for line in shown] == [f"domain-{n:03}" for n in range(len(shown))]
    (more,) = [line for line in lines if line.startswith(f"+{100 - len(shown)} more")]
    assert width < 60 or "1 of them not ok" in more
    assert "33.3%" in shown[1]
    if num_jobs:
        num_shown = sum(line.startswith("job-") for line in lines)
        assert any(line.startswith(f"+{30 - num_shown} more jobs") for line in lines)


@pytest.mark.parametrize(("width", "height"), [(80, 24), (200, 60)])
def test_domains_that_fit_leave_nothing_out(width, height):
    lines = screen(8, 2, width, height)
    assert sum(line.startswith("domain-") for line in lines) == 8
    assert not any(line.startswith("+") for line in lines)
    (ill,) = [line for line in lines if "quarantined" in line]
    assert ill.startswith("domain-007")


def test_once_on_a_terminal_gives_every_domain_a_line():
    lines = screen(100, 30, 80, 24, all_rows=True)
    assert sum(line.startswith("domain-") for line in lines) == 100
    assert sum(line.startswith("job-") for line in lines) == 30
