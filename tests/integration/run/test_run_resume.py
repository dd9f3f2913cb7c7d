import json
import os
import random
import re
import shutil
import signal
import sqlite3
import subprocess
import time
from pathlib import Path

import pytest

from burnish.store.reader import RunReader

ALL = ("letters", "other_letters", "slow_letters")


def books(run_dir):
    """What became of every group, in the order of dispatch."""
    with sqlite3.connect(f"file:{run_dir}/ledger.sqlite?mode=ro", uri=True) as db:
        return db.execute(
            "SELECT group_id, dispatched_step, dispatched_version, resolved_step, state, "
            "trained_rollouts, dropped_rollouts FROM groups ORDER BY rowid"
        ).fetchall()


def tokens(run_dir):
    """Every sampled stream of the training pool, bit for bit."""
    return {
        s.rollout.rollout_id: (s.rollout.token_ids, s.rollout.logprobs, s.advantages)
        for s in RunReader(Path(run_dir)).rollouts()
    }


def same_run(left, right, runner):
    assert left["domains"] == right["domains"]
    assert left["ledger"] == right["ledger"]
    assert books(left["run_dir"]) == books(right["run_dir"])
    assert tokens(left["run_dir"]) == tokens(right["run_dir"])
    assert runner.weights_digest(left["run_dir"]) == runner.weights_digest(right["run_dir"])


@pytest.mark.slow
def test_two_deterministic_runs_are_equal_bit_for_bit(recipe, burnish_run):
    path = recipe(*ALL, deterministic=True)
    same_run(burnish_run.result(path), burnish_run.result(path), burnish_run)


@pytest.mark.slow
def test_a_run_killed_anywhere_and_resumed_equals_the_one_that_was_not(recipe, burnish_run):
    path = recipe(*ALL, deterministic=True)
    whole = burnish_run.result(path)
    events = list(RunReader(Path(whole["run_dir"])).events())
    duration_s = events[-1].t - events[0].t
    rng = random.Random(7)
    kills = 0
    directory = None
    for _ in range(12):
        runs = Path(whole["run_dir"]).parent
        before = set(runs.iterdir())
        process = burnish_run.start(*(("--resume", directory) if directory else (path,)))
        # A hidden one is not a run yet.
        while directory is None:
            assert process.poll() is None
            new = {p for p in runs.iterdir() if not p.name.startswith(".")} - before
            (directory,) = new or (None,)
            time.sleep(0.02)
        try:
            process.wait(timeout=rng.uniform(0.2, 1.0) * duration_s)
        except subprocess.TimeoutExpired:
            os.kill(process.pid, signal.SIGKILL)
            kills += 1
        process.communicate()
    resumed = burnish_run.result("--resume", directory)
    assert kills >= 3
    same_run(whole, resumed, burnish_run)


@pytest.mark.slow
def test_an_asynchronous_run_killed_anywhere_loses_no_rollout_and_counts_none_twice(
    recipe, burnish_run, tmp_path
):
    path = recipe(*ALL)
    rng = random.Random(11)
    process = burnish_run.start(path)
    runs = tmp_path / "runs"
    while not (runs.is_dir() and list(runs.glob("t-*/events.jsonl"))):
        assert process.poll() is None
        time.sleep(0.05)
    (directory,) = runs.glob("t-*")
    for _ in range(6):
        time.sleep(rng.uniform(2.0, 14.0))
        process.kill()
        process.communicate()
        process = burnish_run.start("--resume", directory)
    done = burnish_run.finish(process)
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(done.stdout.splitlines()[-1])
    ledger = result["ledger"]
    assert ledger["in_flight"] == 0
    assert ledger["dispatched"] == ledger["trained"] + sum(ledger["dropped"].values())
    rows = books(directory)
    assert len({row[0] for row in rows}) == len(rows)
    trained = {row[0] for row in rows if row[4] == "trained"}
    stored = {s.rollout.group_id for s in RunReader(directory).rollouts()}
    assert trained <= stored


def test_ctrl_c_stops_with_a_checkpoint_and_names_the_command_that_goes_on(
    recipe, burnish_run, tmp_path
):
    process = burnish_run.start(recipe(), "--set", "run.steps=60")
    deadline = time.monotonic() + 200
    runs = tmp_path / "runs"
    while '"step_finished"' not in "".join(p.read_text() for p in runs.glob("t-*/events.jsonl")):
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    done = burnish_run.finish(process)
    assert done.returncode == 130, done.stderr
    command = re.search(r"burnish run --resume (\S+)", done.stderr)
    assert command, done.stderr
    assert "Traceback" not in done.stderr
    assert list(Path(command[1]).glob("checkpoints/step-*"))


def test_a_configuration_changed_on_resume_is_refused_and_nothing_is_touched(
    recipe, burnish_run, tmp_path
):
    path = recipe()
    result = burnish_run.result(path)
    directory = Path(result["run_dir"])
    (directory / "result.json").unlink()
    before = {p: p.stat().st_mtime_ns for p in directory.rglob("*") if p.is_file()}
    done = burnish_run("--resume", directory, "--set", "train.lr=0.5")
    assert done.returncode == 2
    assert "train.lr" in done.stderr
    assert "Fix:" in done.stderr
    assert {p: p.stat().st_mtime_ns for p in directory.rglob("*") if p.is_file()} == before


def test_a_finished_run_is_not_run_again(recipe, burnish_run):
    result = burnish_run.result(recipe())
    assert burnish_run.result("--resume", result["run_dir"]) == result


def test_a_resume_without_its_checkpoints_does_not_start_over(recipe, burnish_run):
    result = burnish_run.result(recipe())
    directory = Path(result["run_dir"])
    (directory / "result.json").unlink()
    shutil.rmtree(directory / "checkpoints")
    (directory / "checkpoints").mkdir()
    done = burnish_run("--resume", directory)
    assert done.returncode == 2
    assert "checkpoints of this run are gone" in done.stderr


def test_a_damaged_checkpoint_gives_way_to_the_one_before(recipe, burnish_run):
    path = recipe(deterministic=True)
    whole = burnish_run.result(path)
    directory = Path(whole["run_dir"])
    digest = burnish_run.weights_digest(directory)
    (directory / "result.json").unlink()
    (directory / "evals" / "after.json").unlink()
    newest = sorted((directory / "checkpoints").glob("step-*"))[-1]
    with open(newest / "tensors.safetensors", "r+b") as file:
        file.truncate(1000)
    resumed = burnish_run.result("--resume", directory)
    assert resumed["ledger"] == whole["ledger"]
    assert burnish_run.weights_digest(directory) == digest
