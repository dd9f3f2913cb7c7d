import contextlib
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from burnish.core.clock import ManualClock
from burnish.core.disk import DiskFullError
from burnish.core.errors import UserError
from burnish.core.records import Failure, Group, Message, Rollout, Turn, Verdict
from burnish.core.vocabulary import FailureKind, Outcome, StopReason
from burnish.store.manifest import Manifest, read_manifest
from burnish.store.reader import RunReader
from burnish.store.run_directory import EvalName, RunDirectory
from burnish.telemetry.events import EventKind
from burnish.telemetry.metrics import Sample

MANIFEST = Manifest(
    burnish_version="0.1.0",
    created_at="2026-01-01T00:00:00+00:00",
    seed=7,
    versions={"python": "3.11"},
    hardware={"cpus": 2},
    model_digest="sha256:aa",
    environments={"add": "sha256:bb"},
)


def create(path: Path) -> RunDirectory:
    return RunDirectory.create(path, MANIFEST, "seed = 7\n", "seed = 7  # x.toml:1\n")


def group(index: int, length: int = 4) -> Group:
    rollouts = tuple(
        Rollout(
            rollout_id=f"add/{index}/{sample}",
            group_id=f"add/{index}",
            domain="add",
            environment_digest="sha256:bb",
            token_ids=tuple(range(length)),
            num_prompt_tokens=1,
            sampled_mask=(False,) + (True,) * (length - 1),
            logprobs=(0.0,) + (-0.5,) * (length - 1),
            weight_versions=(-1,) + (0,) * (length - 1),
            turns=(Turn(start=1, end=length, stop_reason=StopReason.STOP),),
            messages=(Message(role="user", content="?"),),
            verdict=Verdict(outcome=Outcome.SCORED, score=1.0, passed=True),
            spans=(),
            seed=1,
            duration_s=0.0,
        )
        for sample in range(2)
    )
    return Group(
        group_id=f"add/{index}", domain="add", index=index, dispatched_version=0, rollouts=rollouts
    )


def test_a_new_run_directory_has_the_documented_files(tmp_path: Path) -> None:
    with create(tmp_path / "runs" / "a") as run:
        assert run.manifest == MANIFEST
        assert run.config_text == "seed = 7\n"
        names = {p.name for p in run.path.iterdir() if not p.name.startswith("ledger.sqlite-")}
    assert names == {
        "config.toml", "config.resolved.toml", "manifest.json", "ledger.sqlite", "events.jsonl",
        "failures.jsonl", "metrics", "rollouts", "evals", "logs", "checkpoints", "lock",
    }  # fmt: skip
    assert [p.name for p in (tmp_path / "runs").iterdir()] == ["a"]


def test_what_a_run_writes_its_readers_find_live_and_afterwards(tmp_path: Path) -> None:
    clock = ManualClock(1.0)
    run = RunDirectory.create(tmp_path / "a", MANIFEST, "", "seed = 7  # default\n", clock)
    reader = RunReader(tmp_path / "a")
    assert (reader.result(), list(reader.events()), reader.metrics()) == (None, [], {})
    assert reader.evaluation("before") is None
    run.events.emit(EventKind.RUN_STARTED, 0)
    run.metrics.append(1, [Sample(name="loss", label="", value=0.5)])
    run.ledger.dispatch("add/0", "add", 0, 2, 1, 0)
    run.rollouts.append(group(0))
    run.rollouts.append_advantages(1, {"add/0/1": (0.0, 1.0, 1.0, 1.0)})
    run.ledger.complete("add/0", 1)
    run.append_failure(1, "add/1", Failure(kind=FailureKind.INFRA, where="engine", message="m"))
    run.write_evaluation(EvalName.BEFORE, group(0).rollouts)
    run.write_result({"ratio": float("nan"), "ok": True})
    run.write_report("<p>report")
    for live in (True, False):
        if not live:
            run.close()
            run.close()
        assert reader.manifest == MANIFEST
        assert reader.config() == {"seed": 7}
        assert [e.kind for e in reader.events()] == ["run_started"]
        assert reader.metrics() == {"loss": {"": [(1, 0.5)]}}
        counts = reader.ledger()
        assert counts is not None
        assert (counts.dispatched, counts.in_flight) == (2, 2)
        assert [(f.subject, f.failure.kind) for f in reader.failures()] == [("add/1", "infra")]
        assert reader.evaluation("before") == list(group(0).rollouts)
        assert reader.result() == {"ratio": None, "ok": True}
        stored = list(reader.rollouts("add"))
        assert [s.advantages for s in stored] == [None, (0.0, 1.0, 1.0, 1.0)]
        assert list(reader.rollouts("sort")) == []
        newest = reader.sample_rollouts(1)["add"]
        assert [s.rollout.rollout_id for s in newest] == ["add/0/1"]
    with pytest.raises(ValueError, match="nonsense"):
        reader.evaluation("nonsense")


def test_rollback_undoes_ledger_metrics_and_advantages_but_keeps_finished_groups(
    tmp_path: Path,
) -> None:
    with create(tmp_path / "a") as run:
        for index, step in enumerate((1, 2)):
            run.ledger.dispatch(f"add/{index}", "add", index, 2, 1, 0)
            run.rollouts.append(group(index))
            run.ledger.complete(f"add/{index}", step)
            run.ledger.train([f"add/{index}"], step)
            run.rollouts.append_advantages(step, {f"add/{index}/0": (0.0, 1.0, 1.0, 1.0)})
            run.metrics.append(step, [Sample(name="loss", label="", value=0.5)])
        for _ in range(2):
            run.rollback_to(1)
            states = [row.state.value for row in run.ledger.groups()]
            assert states == ["trained", "in_flight"]
            assert RunReader(run.path).metrics()["loss"][""] == [(1, 0.5)]
            assert run.rollouts.get_group("add/1") == group(1)


def test_a_directory_in_use_names_its_process(tmp_path: Path) -> None:
    with create(tmp_path / "a"):
        with pytest.raises(UserError, match=f"in use by process {os.getpid()}"):
            RunDirectory.open(tmp_path / "a")
        with pytest.raises(UserError, match="holds a run already"):
            create(tmp_path / "a")
    RunDirectory.open(tmp_path / "a").close()


def test_a_killed_owner_leaves_no_lock(tmp_path: Path) -> None:
    create(tmp_path / "a").close()
    code = (
        "import sys; from pathlib import Path; from burnish.store.run_directory import *;"
        "run = RunDirectory.open(Path(sys.argv[1])); print('open', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "a")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "open\n"
        with pytest.raises(UserError, match=f"in use by process {process.pid}"):
            RunDirectory.open(tmp_path / "a")
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    RunDirectory.open(tmp_path / "a").close()


def refusal(path: Path) -> str:
    with pytest.raises(UserError) as caught:
        RunDirectory.open(path).close()
    assert "\n" not in str(caught.value)
    with contextlib.suppress(UserError):
        RunReader(path)
    return str(caught.value)


def test_what_is_no_run_directory_is_told(tmp_path: Path) -> None:
    assert "no such run directory" in refusal(tmp_path / "absent")
    assert "not a run directory" in refusal(tmp_path)
    (tmp_path / "file").write_text("x")
    assert "not a run directory" in refusal(tmp_path / "file")


V1 = {
    "format_version": 1, "burnish_version": "0.1.0", "created_at": "2026-01-01T00:00:00+00:00",
    "seed": 7, "versions": {"python": "3.11"}, "hardware": {"cpus": 2},
    "model_digest": "sha256:aa", "environments": {"add": "sha256:bb"},
}  # fmt: skip


@pytest.mark.parametrize(
    ("manifest", "reason"),
    [
        ({**V1, "format_version": 0}, "run format 0 (made by burnish 0.1.0), this program reads 1"),
        ({**V1, "format_version": 99, "burnish_version": "9.0", "new": 1}, "run format 99 (made"),
        ({"format_version": "1"}, "run format 1 (made by burnish an unknown version)"),
        ({}, "run format None"),
        ({"format_version": 1}, "manifest.json: damaged"),
        ({**V1, "seed": "x"}, "manifest.json: damaged"),
        ([], "manifest.json: damaged"),
    ],
)
def test_other_versions_and_damaged_manifests_are_refused(
    tmp_path: Path, manifest: Any, reason: str
) -> None:
    create(tmp_path / "a").close()
    (tmp_path / "a" / "manifest.json").write_text(json.dumps(manifest))
    assert reason in refusal(tmp_path / "a")


def test_the_manifest_of_version_1_is_read_for_ever(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text(json.dumps(V1))
    assert read_manifest(tmp_path) == MANIFEST


@pytest.mark.parametrize("keep", [0, 1, 50, 150, -2])
def test_a_truncated_manifest_or_ledger_is_told(tmp_path: Path, keep: int) -> None:
    run = create(tmp_path / "a")
    run.ledger.dispatch("add/0", "add", 0, 2, 1, 0)
    run.close()
    for name in ("manifest.json", "ledger.sqlite"):
        shutil.copytree(tmp_path / "a", tmp_path / name)
        path = tmp_path / name / name
        whole = path.read_bytes()
        path.write_bytes(whole[:keep])
        assert f"{name}: damaged" in refusal(tmp_path / name)


def test_a_lost_ledger_is_not_replaced_by_an_empty_one(tmp_path: Path) -> None:
    create(tmp_path / "a").close()
    (tmp_path / "a" / "ledger.sqlite").unlink()
    assert "damaged (absent)" in refusal(tmp_path / "a")


def test_a_directory_of_the_user_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("mine")
    with pytest.raises(UserError, match="is not empty"):
        create(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["config.toml"]
    (tmp_path / "empty").mkdir()
    create(tmp_path / "empty").close()


def test_a_place_that_cannot_hold_a_directory_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError):
        create(tmp_path / "file")
    with pytest.raises(UserError, match="cannot be used as a run directory"):
        create(tmp_path / "file" / "run")
    with pytest.raises(UserError, match="cannot be used as a run directory"):
        create(Path("/proc/run"))


CREATOR = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from test_store_run_directory import create
print("go", flush=True)
for n in range(1000):
    create(Path(sys.argv[1]) / str(n)).close()
"""


def test_a_creation_that_was_killed_leaves_nothing_that_looks_like_a_run(tmp_path: Path) -> None:
    here = str(Path(__file__).parent)
    for _ in range(3):
        for old in tmp_path.iterdir():
            shutil.rmtree(old)
        command = [sys.executable, "-c", CREATOR, str(tmp_path), here]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            process.stdout.readline()
            while len(list(tmp_path.iterdir())) < 3:
                pass
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
        for path in sorted(tmp_path.iterdir()):
            if path.name.startswith("."):
                create(
                    path.with_name(path.name.removeprefix(".").removesuffix(".creating"))
                ).close()
            elif path.exists():
                RunDirectory.open(path).close()
        assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "disk"
    path.mkdir()
    options = ["-t", "tmpfs", "-o", "size=600k"]
    mount = shutil.which("mount")
    if mount is None:
        pytest.skip("there is no mount command")
    done = subprocess.run([mount, *options, "burnish-test", path], capture_output=True, check=False)
    if done.returncode != 0:
        pytest.skip("mounting a small tmpfs needs root")
    yield path
    # Lazily: a failed test may have left files open.
    subprocess.run(["umount", "-l", path], check=True)


def fill(path: Path, leave_bytes: int) -> Path:
    ballast = path / "ballast"
    with open(ballast, "ab") as file:
        free = shutil.disk_usage(path).free
        file.write(b"x" * max(0, free - leave_bytes))
    return ballast


def test_a_full_disk_is_one_line_and_the_run_goes_on_after_space_is_made(small_disk: Path) -> None:
    run = create(small_disk / "a")
    run.rollouts.append(group(0))
    run.ledger.dispatch("add/0", "add", 0, 2, 1, 0)
    run.metrics.append(1, [Sample(name="loss", label="", value=0.5)])
    run.events.emit(EventKind.RUN_STARTED, 0)
    ballast = fill(small_disk, 0)
    events = [e.kind for e in RunReader(run.path).events()]

    def dispatch_many() -> None:
        for index in range(2000):
            run.ledger.dispatch(f"b/{index}", "b", index, 2, 1, 0)

    failure = Failure(kind=FailureKind.INFRA, where="w", message="m" * 10_000)
    attempts: list[Callable[[], object]] = [
        lambda: run.rollouts.append(group(1)),
        lambda: run.metrics.append(2, [Sample(name="loss", label="", value=0.5)]),
        lambda: run.events.emit(EventKind.RUN_FAILED, 0, text="x" * 10_000),
        lambda: run.append_failure(0, "x", failure),
        lambda: run.write_evaluation(EvalName.BEFORE, group(0).rollouts),
        lambda: run.write_result({"a": 1}),
        dispatch_many,
    ]
    for attempt in attempts:
        with pytest.raises(DiskFullError, match="bytes free") as caught:
            attempt()
        assert "\n" not in str(caught.value)
        assert str(run.path) in str(caught.value)
    with pytest.raises(DiskFullError):
        create(small_disk / "b")
    assert {p.name for p in small_disk.iterdir()} == {"a", "ballast"}
    assert [e.kind for e in RunReader(run.path).events()] == events
    run.ledger.verify()
    ballast.unlink()
    run.events.emit(EventKind.RUN_RESUMED, 0)
    assert [e.kind for e in RunReader(run.path).events()] == [*events, EventKind.RUN_RESUMED]
    run.rollouts.append(group(1))
    run.close()
    with RunDirectory.open(small_disk / "a") as again:
        assert again.rollouts.group_ids() == {"add/0", "add/1"}
        again.ledger.verify()
        assert again.ledger.get("add/0") is not None


def test_a_run_killed_by_a_full_disk_at_any_moment_can_be_opened_again(small_disk: Path) -> None:
    create(small_disk / "a").close()
    for round_ in range(6):
        run = RunDirectory.open(small_disk / "a")
        stored = run.rollouts.group_ids()
        ballast = fill(small_disk, 30_000 + 7_000 * round_)
        acknowledged = []
        with pytest.raises(DiskFullError):  # noqa: PT012 - it may strike anywhere
            for index in range(len(stored), 10_000):
                run.ledger.dispatch(f"add/{index}", "add", index, 2, round_, 0)
                run.rollouts.append(group(index, length=400))
                run.ledger.complete(f"add/{index}", round_)
                acknowledged.append(f"add/{index}")
        with contextlib.suppress(DiskFullError):
            run.close()
        ballast.unlink()
        with RunDirectory.open(small_disk / "a") as again:
            again.ledger.verify()
            assert again.rollouts.group_ids() >= stored | set(acknowledged)
            again.rollouts.discard(again.rollouts.group_ids())
            again.rollback_to(-1)
            assert again.ledger.counts().dispatched == 0


def test_a_foreign_database_in_place_of_the_ledger_is_refused(tmp_path: Path) -> None:
    create(tmp_path / "a").close()
    path = tmp_path / "a" / "ledger.sqlite"
    path.unlink()
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE other (x)")
    db.close()
    assert "ledger format 0" in refusal(tmp_path / "a")
