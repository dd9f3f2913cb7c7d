"""A live run, looked at and changed from outside; jobs that share a machine."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from live_process import until

from burnish.core.errors import UserError
from burnish.run.control.client import ask
from burnish.run.control.messages import Request, Verb, socket_path
from burnish.run.jobs.messages import JobRequest, JobVerb, jobs_socket
from burnish.store.reader import RunReader
from burnish.telemetry.events import EventKind, read_events

HERE = Path(__file__).parent
COMMAND = (sys.executable, "-m", "burnish.cli.main")


def answering(runs: Path, request: Request):
    def look():
        for path in runs.glob("t-*/control.sock"):
            try:
                return path.parent, ask(path, request)
            except UserError:
                return None
        return None

    return look


@pytest.mark.slow
def test_domains_come_and_go_in_a_live_run_and_a_resume_knows_them(recipe, burnish_run, tmp_path):
    process = burnish_run.start(recipe("letters", "other_letters"), "--set", "run.steps=400")
    run, status = until(answering(tmp_path / "runs", Request(verb=Verb.STATUS)), process)
    assert {d["domain"] for d in status.result["domains"]} == {"letters", "other_letters"}

    def tell(**fields):
        return ask(socket_path(run), Request(**fields))

    assert tell(verb=Verb.PAUSE).ok
    assert tell(verb=Verb.STATUS).result["paused"]
    refused = tell(verb=Verb.ADD, domain="pays_nothing", environment="run_environments:PaysNothing")
    assert "quality gate" in refused.error
    assert tell(
        verb=Verb.ADD, domain="slow_letters", environment="run_environments:SlowVerdict", weight=2.0
    ).ok
    assert "trained already" in tell(verb=Verb.ADD, domain="slow_letters").error
    assert tell(verb=Verb.REMOVE, domain="other_letters").ok
    assert "does not train" in tell(verb=Verb.REMOVE, domain="other_letters").error
    assert "was removed" in tell(verb=Verb.ADD, domain="other_letters").error
    assert tell(verb=Verb.SHARE, domain="letters", min_share=0.3, false_pass=0.25).ok
    assert "last domain" not in (tell(verb=Verb.SHARE, domain="letters", weight=3.0).error or "")
    assert tell(verb=Verb.RESUME).ok
    step = tell(verb=Verb.STATUS).result["step"]
    until(lambda: tell(verb=Verb.STATUS).result["step"] >= step + 4, process)
    rows = {d["domain"]: d for d in tell(verb=Verb.STATUS).result["domains"]}
    assert set(rows) == {"letters", "slow_letters"}
    assert rows["slow_letters"]["num_picks"] > 0
    assert tell(verb=Verb.STOP).ok
    assert burnish_run.finish(process).returncode == 130

    kinds = [e.kind for e in read_events(run / "events.jsonl")]
    assert kinds.count(EventKind.CONTROLLED) == 7
    resumed = burnish_run.start("--resume", run)
    _, after = until(answering(tmp_path / "runs", Request(verb=Verb.STATUS)), resumed)
    assert {d["domain"] for d in after.result["domains"]} == {"letters", "slow_letters"}
    ask(socket_path(run), Request(verb=Verb.STOP))
    assert burnish_run.finish(resumed).returncode == 130


@pytest.mark.slow
def test_an_urgent_job_takes_the_place_of_another_which_goes_on_from_its_checkpoint(
    recipe, tmp_path
):
    config = recipe("letters")
    directory = tmp_path / "jobs"
    path = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))
    daemon = subprocess.Popen(
        [*COMMAND, "jobs", "serve", "--units", "1", "--directory", str(directory)],
        env=os.environ | {"PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:

        def jobs(**fields):
            try:
                answer = ask(jobs_socket(directory), JobRequest(**fields))
            except (UserError, FileNotFoundError):
                return None
            assert answer.ok, answer.error
            return {row["spec"]["job_id"]: row for row in answer.result["jobs"]}

        until(lambda: jobs(verb=JobVerb.LIST) is not None, daemon)
        jobs(verb=JobVerb.SUBMIT, job_id="long", config=str(config), overrides=("run.steps=60",))
        until(lambda: list(directory.glob("long/t-*/control.sock")), daemon)
        jobs(
            verb=JobVerb.SUBMIT, job_id="urgent", config=str(config), priority=5,
            overrides=("run.steps=2",),
        )  # fmt: skip
        done = until(
            lambda: all(r["state"] == "done" for r in jobs(verb=JobVerb.LIST).values()), daemon
        )
        assert done
        rows = jobs(verb=JobVerb.LIST)
        assert rows["long"]["num_starts"] == 2
        assert rows["urgent"]["num_starts"] == 1
    finally:
        daemon.terminate()
        _, err = daemon.communicate(timeout=60)
    assert daemon.returncode == 0, err[-2000:]
    (run,) = directory.glob("long/t-*")
    kinds = [e.kind for e in read_events(run / "events.jsonl")]
    assert EventKind.RUN_INTERRUPTED in kinds
    assert EventKind.RUN_RESUMED in kinds
    result = RunReader(run).result()
    assert result is not None
    (other,) = directory.glob("urgent/t-*")
    assert json.loads((other / "result.json").read_text())
    ended = [e.t for e in read_events(other / "events.jsonl") if e.kind is EventKind.RUN_FINISHED]
    resumed = [e.t for e in read_events(run / "events.jsonl") if e.kind is EventKind.RUN_RESUMED]
    assert ended[0] < resumed[0]


@pytest.mark.slow
def test_a_run_whose_daemon_was_killed_is_waited_for_by_the_next_one(recipe, tmp_path):
    config, directory = recipe("letters"), tmp_path / "jobs"
    path = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))

    def serve():
        return subprocess.Popen(
            [*COMMAND, "jobs", "serve", "--units", "1", "--directory", str(directory)],
            env=os.environ | {"PYTHONPATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def jobs(**fields):
        try:
            answer = ask(jobs_socket(directory), JobRequest(**fields))
        except (UserError, FileNotFoundError):
            return {}
        assert answer.ok, answer.error
        return {row["spec"]["job_id"]: row for row in answer.result["jobs"]}

    daemon = serve()
    try:
        until(jobs_socket(directory).exists, daemon)
        for name, steps in (("first", 20), ("second", 2)):
            jobs(verb=JobVerb.SUBMIT, job_id=name, config=str(config),
                 overrides=(f"run.steps={steps}", "evaluate.tasks_per_domain=0"))  # fmt: skip
        until(lambda: list(directory.glob("first/t-*/control.sock")), daemon)
        daemon.kill()
        daemon.communicate()
        daemon = serve()
        found = until(lambda: jobs(verb=JobVerb.LIST), daemon)
        assert {name: row["state"] for name, row in found.items()} == {
            "first": "running",
            "second": "queued",
        }
        until(lambda: all(r["state"] == "done" for r in jobs(verb=JobVerb.LIST).values()), daemon)
    finally:
        daemon.terminate()
        _, err = daemon.communicate(timeout=60)
    assert daemon.returncode == 0, err[-2000:]
    (run,) = directory.glob("first/t-*")
    (other,) = directory.glob("second/t-*")
    kinds = [e.kind for e in read_events(run / "events.jsonl")]
    assert EventKind.RUN_RESUMED not in kinds
    assert EventKind.RUN_FINISHED in kinds
    ended = [e.t for e in read_events(run / "events.jsonl") if e.kind is EventKind.RUN_FINISHED]
    began = [e.t for e in read_events(other / "events.jsonl") if e.kind is EventKind.RUN_STARTED]
    assert ended[0] <= began[0]
