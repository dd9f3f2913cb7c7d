"""`burnish top` beside a live run, and on what it left."""

import json
import subprocess
import sys

import pytest

from burnish.core.errors import UserError
from burnish.run.control.client import ask
from burnish.run.control.messages import Request, Verb, socket_path


def top(run):
    words = [sys.executable, "-m", "burnish.cli.main", "top", str(run), "--json"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


@pytest.mark.slow
def test_a_live_run_and_its_records_are_shown_alike(recipe, burnish_run, tmp_path):
    process = burnish_run.start(recipe(), "--set", "run.steps=60")
    found = None
    while process.poll() is None and found is None:
        for path in (tmp_path / "runs").glob("t-*/control.sock"):
            try:
                step = ask(path, Request(verb=Verb.STATUS)).result["step"]
            except UserError:
                continue
            if step >= 2:
                found = path.parent
    assert found is not None, process.communicate()[1][-2000:]
    live = top(found)
    assert live["is_live"]
    assert live["state"] == "training"
    assert live["step"] >= 2
    assert live["engine_tokens_per_s"] > 0
    assert 0.0 <= live["engine_idle"] <= 1.0
    ask(socket_path(found), Request(verb=Verb.STOP))
    assert burnish_run.finish(process).returncode == 130
    over = top(found)
    assert not over["is_live"]
    assert over["state"] == "stopped"
    assert over["step"] >= live["step"]
    assert {d["domain"] for d in over["domains"]} == {d["domain"] for d in live["domains"]}
    for row in (*live["domains"], *over["domains"]):
        assert row["wait"] <= row["bound"]
        assert "waits at most" in row["why"]
        assert row["gain_per_cost"] is not None
    assert sum(d["share"] for d in over["domains"]) == pytest.approx(1.0)
