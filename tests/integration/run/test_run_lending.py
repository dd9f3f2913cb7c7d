"""A run that stands still lends its cores; the guest gives them back at a checkpoint."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from live_process import until

from burnish.core.errors import UserError
from burnish.run.control.client import ask
from burnish.run.control.messages import Request, Verb
from burnish.run.jobs.messages import JobRequest, JobVerb, jobs_socket
from burnish.telemetry.events import EventKind, read_events

HERE = Path(__file__).parent


@pytest.mark.slow
def test_a_paused_run_lends_its_cores_and_takes_them_back_and_both_finish(recipe, tmp_path):
    config, directory = recipe("letters"), tmp_path / "jobs"
    path = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))
    daemon = subprocess.Popen(
        [*(sys.executable, "-m", "burnish.cli.main", "jobs", "serve", "--units", "2"),
         *("--lend-after", "3", "--directory", str(directory))],
        env=os.environ | {"PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip

    def jobs(**fields):
        try:
            answer = ask(jobs_socket(directory), JobRequest(**fields))
        except (UserError, FileNotFoundError):
            return None
        assert answer.ok, answer.error
        return {row["spec"]["job_id"]: row for row in answer.result["jobs"]}

    def submit(name, units, steps):
        jobs(verb=JobVerb.SUBMIT, job_id=name, config=str(config), units=units,
             overrides=(f"run.steps={steps}", "evaluate.tasks_per_domain=0"))  # fmt: skip

    def row(name):
        return jobs(verb=JobVerb.LIST)[name]

    def told(name, verb):
        def look():
            for socket in directory.glob(f"{name}/t-*/control.sock"):
                try:
                    return ask(socket, Request(verb=verb)).ok
                except UserError:
                    return False
            return False

        return look

    try:
        until(lambda: jobs(verb=JobVerb.LIST) is not None, daemon)
        submit("host", 2, 60)
        until(told("host", Verb.PAUSE), daemon)
        submit("guest", 1, 60)
        until(lambda: row("guest")["is_guest"], daemon)
        assert row("host")["lent"] == 1
        until(told("guest", Verb.STATUS), daemon)
        assert told("host", Verb.RESUME)()
        until(lambda: row("guest")["state"] in ("stopping", "queued"), daemon)
        until(lambda: all(r["state"] == "done" for r in jobs(verb=JobVerb.LIST).values()), daemon)
        assert row("guest")["num_starts"] >= 2
        assert row("host")["num_starts"] == 1
    finally:
        daemon.terminate()
        _, err = daemon.communicate(timeout=120)
    assert daemon.returncode == 0, err[-2000:]
    for name, steps in (("host", 60), ("guest", 60)):
        (run,) = directory.glob(f"{name}/t-*")
        ledger = json.loads((run / "result.json").read_text())["ledger"]
        assert ledger["dispatched"] == ledger["trained"] + sum(ledger["dropped"].values())
        assert ledger["in_flight"] == 0
        events = list(read_events(run / "events.jsonl"))
        finished = {e.step for e in events if e.kind is EventKind.STEP_FINISHED}
        assert set(range(1, steps + 1)) <= finished
