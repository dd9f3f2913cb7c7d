"""The report of a real run directory, whole, torn or just begun."""

import itertools
import json
import shutil
from pathlib import Path

import pytest

from burnish.core.clock import ManualClock
from burnish.core.errors import UserError
from burnish.core.records import (
    Credit,
    Failure,
    Group,
    Message,
    Rollout,
    ToolCall,
    Turn,
    Verdict,
)
from burnish.core.vocabulary import CreditSource, DropReason, FailureKind, Outcome, StopReason
from burnish.observe.gather import bottleneck, config_origins, gather
from burnish.observe.report import write_report
from burnish.observe.token_text import TokenText
from burnish.observe.transcripts import samples
from burnish.store.manifest import Manifest
from burnish.store.reader import RunReader
from burnish.store.run_directory import EvalName, RunDirectory
from burnish.telemetry.events import EventKind
from burnish.telemetry.metrics import Sample

CONFIG = """\
[model]
source = "tiny"  # a.toml:2

[run]
steps = 2  # default
# name is not set  # default
"""


CALL = ToolCall(name="t", arguments={"a": 1})


def rollout(domain: str, index: int, sample: int, passed: bool, text: str = "42") -> Rollout:
    score = 1.0 if passed else 0.25
    return Rollout(
        rollout_id=f"{domain}/{index}/{sample}",
        group_id=f"{domain}/{index}",
        domain=domain,
        environment_digest="sha256:0",
        token_ids=(1, 2, 3, 4),
        num_prompt_tokens=2,
        sampled_mask=(False, False, True, True),
        logprobs=(0.0, 0.0, -0.5, -0.25),
        weight_versions=(-1, -1, 1, 1),
        turns=(Turn(start=2, end=4, stop_reason=StopReason.STOP),),
        messages=(
            Message(role="user", content="6 * 7?"),
            Message(
                role="assistant", content=text, tool_calls=(ToolCall(name="t", arguments={"a": 1}),)
            ),
        ),
        verdict=Verdict(
            outcome=Outcome.SCORED,
            score=score,
            passed=passed,
            credits=(Credit(source=CreditSource.OUTCOME, value=float(passed), note="checked"),),
        ),
        spans=(),
        seed=1,
        duration_s=0.1,
    )


def manifest() -> Manifest:
    return Manifest(
        burnish_version="0.1.0",
        created_at="2026-11-29T00:00:00Z",
        seed=7,
        versions={"python": "3.11.7"},
        hardware={"num_cores": 2, "memory_bytes": 8_000_000_000},
        model_digest="sha256:1",
        environments={"sums": "sha256:0"},
    )


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two groups: one trained, one dropped; an evaluation before and after."""
    path = tmp_path / "run"
    with RunDirectory.create(path, manifest(), "", CONFIG, ManualClock()) as directory:
        directory.events.emit(EventKind.RUN_STARTED, 0)
        checked = {"domain": "sums", "verdict": "pass", "reason": ""}
        directory.events.emit(EventKind.ENVIRONMENT_CHECKED, 0, **checked)
        directory.events.emit(
            EventKind.ENVIRONMENT_QUARANTINED, 0, domain="broken", reason="no reference"
        )
        for index in (0, 1):
            directory.ledger.dispatch(f"sums/{index}", "sums", index, 2, 1, 1)
            group = tuple(rollout("sums", index, s, s == index) for s in (0, 1))
            directory.rollouts.append(
                Group(
                    group_id=f"sums/{index}",
                    domain="sums",
                    index=index,
                    dispatched_version=1,
                    rollouts=group,
                )
            )
            directory.ledger.complete(f"sums/{index}", 1)
        directory.rollouts.append_advantages(1, {"sums/0/0": (0.0, 0.0, 0.5, -0.5)})
        for step in (1, 2):
            rows = {"step_s": 1.0, "engine_busy_ratio": 0.9, "trainer_busy_ratio": 0.4}
            found = [Sample(name=n, label="", value=v) for n, v in rows.items()]
            for name, value in (("reward_mean", 0.5), ("pass_rate", 0.25), ("domain_share", 1.0)):
                found.append(Sample(name=name, label="sums", value=value))
            directory.metrics.append(step, found)
        failure = Failure(kind=FailureKind.SANDBOX, where="box", message="gone")
        for _ in range(3):
            directory.append_failure(1, "sums/0/0", failure)
        directory.write_evaluation(
            EvalName.BEFORE, [rollout("sums", i, 0, i == 1) for i in range(4)]
        )
        directory.write_evaluation(
            EvalName.AFTER, [rollout("sums", i, 0, i == 2) for i in range(4)]
        )
        model = path / "model"
        model.mkdir()
        vocabulary = {"a": 3, "\u0120b": 4}
        document = {"model": {"vocab": vocabulary}, "added_tokens": []}
        (model / "tokenizer.json").write_text(json.dumps(document))
    return path


def test_a_run_that_was_killed_still_has_a_report(run: Path) -> None:
    data = gather(RunReader(run))
    assert "still going, or was killed" in data.status
    assert data.domains == ()
    assert (data.model, data.num_steps) == ("tiny", 2)
    assert (data.ledger.dispatched, data.ledger.in_flight, data.ledger.missing) == (4, 4, 0)
    assert [(f.where, f.count) for f in data.failures] == [("box", 3)]
    assert [(g.name, g.passed) for g in data.gates] == [("sums", True), ("broken", False)]
    assert data.shares is not None
    assert data.shares.by_domain == {"sums": (1.0, 1.0)}
    page = write_report(run).read_text()
    assert "broken is quarantined: no reference" in page


def test_a_finished_run_shows_its_result(run: Path) -> None:
    row = {
        "n": 4,
        "before": 0.25,
        "warmed": None,
        "after": 0.75,
        "diff": 0.5,
        "ci_low": 0.1,
        "ci_high": 0.9,
        "rl_diff": 0.5,
        "rl_ci_low": 0.1,
        "rl_ci_high": 0.9,
    }
    result = {
        "domains": {"sums": row},
        "wall_s": 61.0,
        "peak_rss_bytes": 10**9,
        "canary": {"ok": True, "max_abs_diff": 0.0},
        "mean": {"diff": 0.5, "ci_low": 0.1, "ci_high": 0.9},
    }
    (run / "result.json").write_text(json.dumps(result))
    data = gather(RunReader(run))
    assert data.status == "complete"
    assert data.domains[0].direction == "up"
    assert [(fact.name, fact.value) for fact in data.canary] == [
        ("engine serves the trained weights", "yes"),
        ("largest difference", "0 nats"),
    ]
    assert all(fact.meaning for fact in data.canary)
    assert data.problems == ()
    page = write_report(run).read_text()
    assert "from 25.0\N{NO-BREAK SPACE}% to 75.0\N{NO-BREAK SPACE}%" in page
    assert "[+10.0, +90.0] points" in page


def test_an_interrupted_run_says_that_it_can_be_resumed(run: Path) -> None:
    with RunDirectory.open(run, ManualClock()) as directory:
        directory.events.emit(EventKind.RUN_INTERRUPTED, 0)
    assert gather(RunReader(run)).status == "Stopped after step 2. It can be resumed."


def test_a_failed_run_says_so_and_why(run: Path) -> None:
    with RunDirectory.open(run, ManualClock()) as directory:
        directory.events.emit(EventKind.RUN_FAILED, 2, reason="[infra] engine: no memory")
    status = gather(RunReader(run)).status
    assert status == ("This run failed after step 2: [infra] engine: no memory. It can be resumed.")


def whole_result() -> dict[str, object]:
    row = {"n": 4, "before": 0.25, "after": 0.75, "diff": 0.5, "ci_low": 0.1, "ci_high": 0.9}
    return {"domains": {"sums": row}}


@pytest.mark.parametrize(
    ("part", "alert"),
    [
        ("ledger.sqlite", "ledger.sqlite is missing"),
        ("metrics", "metrics is missing"),
        ("evals", "evals is missing"),
        ("evals/before.parquet", "evals/before.parquet is missing"),
        ("events.jsonl", "events.jsonl is missing"),
        ("config.resolved.toml", "config.resolved.toml is missing"),
    ],
)
def test_a_missing_part_is_named_on_the_page(run: Path, part: str, alert: str) -> None:
    (run / "result.json").write_text(json.dumps(whole_result()))
    path = run / part
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert any(alert in problem for problem in gather(RunReader(run)).problems)
    assert alert in write_report(run).read_text()


LINES = ("events.jsonl", "failures.jsonl", "config.resolved.toml")
WHOLE = ("result.json", "ledger.sqlite", "evals/before.parquet", "model/tokenizer.json")


@pytest.mark.parametrize(
    ("part", "content"),
    [
        # A file of lines may be empty.
        *itertools.product(WHOLE, [b"", b"{\x00\xff\n", b"[[[\n"]),
        *itertools.product(LINES, [b"{\x00\xff\n", b"[[[\n"]),
    ],
)
def test_a_damaged_part_is_named_on_the_page(run: Path, part: str, content: bytes) -> None:
    (run / "result.json").write_text(json.dumps(whole_result()))
    (run / part).write_bytes(content)
    (problem,) = gather(RunReader(run)).problems
    assert Path(part).name in problem
    assert len(problem.splitlines()) == 1
    write_report(run)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b'{"domains": ',
        b"[1]",
        b"\xff",
        b'{"domains": {"a": 5}}',
        b'{"domains": {"a": {"before": "x"}}}',
        b'{"wall_s": "long"}',
    ],
)
def test_a_torn_result_is_the_users_to_restore(run: Path, content: bytes) -> None:
    (run / "result.json").write_bytes(content)
    with pytest.raises(UserError, match=r"result.json: damaged") as caught:
        RunReader(run).result()
    assert len(str(caught.value).splitlines()) == 1


def test_a_missing_configuration_is_the_users_to_restore(run: Path) -> None:
    (run / "config.resolved.toml").unlink()
    with pytest.raises(UserError, match=r"config.resolved.toml: missing"):
        RunReader(run).config()


def test_a_domain_lost_in_the_run_has_a_row_and_an_alert(run: Path) -> None:
    result = whole_result()
    lost = {"n": 0, "before": 0.5, "after": None, "diff": None, "ci_low": None, "ci_high": None}
    result["domains"] = {**result["domains"], "gone": lost}  # type: ignore[dict-item]
    result["quarantined"] = {"gone": "envs.gone.act: it broke"}
    (run / "result.json").write_text(json.dumps(result))
    data = gather(RunReader(run))
    assert [row.name for row in data.domains] == ["sums"]
    assert [row.name for row in data.lost] == ["gone"]
    page = write_report(run).read_text()
    assert "gone is quarantined: envs.gone.act: it broke" in page
    assert "lost in the run" in page


def test_the_name_of_the_run_is_its_title_wherever_the_directory_went(run: Path) -> None:
    text = CONFIG.replace("# name is not set", 'name = "sums"')
    (run / "config.resolved.toml").write_text(text)
    assert gather(RunReader(run)).title == "sums, 2026-11-29 00:00"


def test_the_trainer_saw_the_best_and_the_worst_of_the_last_trained_group(run: Path) -> None:
    with RunDirectory.open(run, ManualClock()) as directory:
        tokens = {"sums/1/0": (0.0, 0.0, -0.5, -0.5), "sums/1/1": (0.0, 0.0, 0.5, 0.5)}
        directory.rollouts.append_advantages(2, tokens)
    views = gather(RunReader(run)).token_views
    shown = [(v.why, v.rollout_id, v.score) for v in views]
    assert shown == [("best", "sums/1/1", 1.0), ("worst", "sums/1/0", 0.25)]


def test_tokens_carry_their_text_and_advantage(run: Path) -> None:
    (view,) = gather(RunReader(run)).token_views
    assert [(p.text, p.advantage) for p in view.pieces] == [("a", 0.5), (" b", -0.5)]


def test_lengths_compare_trained_with_scored_rollouts(run: Path) -> None:
    (row,) = gather(RunReader(run)).lengths
    assert (row.num_all, row.num_trained, row.mean_all) == (4, 1, 2.0)


def test_writing_the_report_twice_gives_the_same_file(run: Path) -> None:
    assert write_report(run).read_bytes() == write_report(run).read_bytes()


def test_a_folder_that_is_no_run_is_refused_and_left_alone(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not a run directory"):
        write_report(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_samples_are_the_first_task_and_the_first_that_changed_either_way() -> None:
    before = [rollout("sums", i, 0, i == 3) for i in range(5)]
    after = [rollout("sums", i, 0, i == 2) for i in range(5)]
    shown = samples(before, after)
    assert [(s.why, s.index) for s in shown] == [("first", 0), ("gained", 2), ("lost", 3)]
    assert shown[0].prompt == "6 * 7?"
    assert shown[0].after is not None
    assert shown[0].after.speeches[0].pieces[0].text == "42\nt(a=1)"


def test_a_very_long_answer_is_cut_and_says_so() -> None:
    (shown,) = samples([], [rollout("sums", 0, 0, True, text="x" * 10_000)])
    assert shown.before is None
    assert shown.after is not None
    assert "more characters" in shown.after.speeches[0].pieces[0].text


def test_characters_split_over_tokens_come_out_whole() -> None:
    # The four bytes of an emoji, one token each, in GPT-2's byte alphabet.
    vocabulary = {"\u00f0": 0, "\u0141": 1, "\u013a": 2, "\u0122": 3, "a": 4}
    texts = TokenText(
        {"model": {"vocab": vocabulary}, "added_tokens": [{"id": 9, "content": "<e>"}]}
    )
    assert "".join(texts.pieces([4, 0, 1, 2, 3, 9, 77])).startswith("a")
    assert len(texts.pieces([4, 0, 1, 2, 3, 9, 77])) == 7
    assert texts.pieces([9, 77]) == ["<e>", "<77>"]


def test_broken_bytes_never_raise() -> None:
    texts = TokenText({"model": {"vocab": {"\u00f0": 0}}})
    assert "\N{REPLACEMENT CHARACTER}" in "".join(texts.pieces([0] * 9))
    assert TokenText({}).pieces([1]) == ["<1>"]


def test_origins_of_the_configuration_are_read_back() -> None:
    assert [(o.key, o.value, o.origin) for o in config_origins(CONFIG)] == [
        ("model.source", '"tiny"', "a.toml:2"),
        ("run.steps", "2", "default"),
    ]


@pytest.mark.parametrize(
    ("engine", "trainer", "verdict"),
    [
        (0.95, 0.4, "sampling is the bottleneck"),
        (0.3, 0.9, "training is the bottleneck"),
        (0.8, 0.85, "they keep pace"),
        (0.2, 0.3, "look at environments"),
    ],
)
def test_the_bottleneck_is_named(engine: float, trainer: float, verdict: str) -> None:
    series = {
        "engine_busy_ratio": {"": [(1, engine)]},
        "trainer_busy_ratio": {"": [(1, trainer)]},
    }
    assert verdict in bottleneck(series)
    assert bottleneck({}) == ""


def test_drop_reasons_are_all_explained() -> None:
    from burnish.observe.page import _REASONS

    assert set(_REASONS) == set(DropReason)
