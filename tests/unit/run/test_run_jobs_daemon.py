"""The daemon of jobs: what it takes up from one that was killed, and what it refuses."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from burnish.cli.main import main
from burnish.core.clock import ManualClock
from burnish.core.errors import UserError
from burnish.run.jobs.daemon import JobsDaemon
from burnish.run.jobs.messages import jobs_socket
from burnish.run.jobs.survivor import find_survivor, note_process
from burnish.schedule.jobs.base import JobsConfig, JobSpec, JobState
from burnish.schedule.jobs.scheduler import JobScheduler

SAYS_AND_SLEEPS = "import signal; print('ready', flush=True); signal.pause()"
OFF = JobsConfig(units=1, lend_after_s=0.0)


@pytest.fixture
def orphan():
    process = subprocess.Popen(
        [sys.executable, "-c", SAYS_AND_SLEEPS], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline()
    yield process
    process.kill()
    process.communicate()


def killed_daemon(directory: Path, pid: int) -> None:
    """What is left of one that ran a job and let another wait, all on one unit."""
    scheduler = JobScheduler(OFF, ManualClock())
    for name in ("first", "second"):
        scheduler.submit(JobSpec(job_id=name, tenant="t", units=1))
    scheduler.plan()
    lines = {"first": ["/missing.toml"], "second": ["/missing.toml"]}
    (directory / "first").mkdir(parents=True)
    note_process(directory / "first", pid)
    saved = {"scheduler": scheduler.state(), "lines": lines}
    (directory / "jobs.json").write_bytes(msgspec.json.encode(saved))


def states(directory: Path) -> dict[str, str]:
    saved = msgspec.json.decode((directory / "jobs.json").read_bytes())
    return {spec["job_id"]: state for spec, state, *_ in saved["scheduler"]["jobs"]}


def test_a_run_that_outlived_its_daemon_keeps_its_units_and_gives_way_when_told(orphan, tmp_path):
    killed_daemon(tmp_path, orphan.pid)

    async def serve() -> dict[str, str]:
        daemon = JobsDaemon(tmp_path, OFF, ManualClock())
        serving = asyncio.create_task(daemon.run())
        for _ in range(50):
            await asyncio.sleep(0)
        assert jobs_socket(tmp_path).exists()
        found = states(tmp_path)
        assert orphan.poll() is None
        daemon.stop()
        await serving
        return found

    assert asyncio.run(serve()) == {"first": "running", "second": "queued"}
    assert orphan.wait() == -signal.SIGTERM
    assert states(tmp_path) == {"first": "queued", "second": "queued"}
    assert not (tmp_path / "first" / "log.txt").exists(), "nothing was started beside it"


def test_a_process_that_only_has_the_number_of_a_job_is_nobodys_survivor(orphan, tmp_path):
    note_process(tmp_path, orphan.pid)
    note = msgspec.json.decode((tmp_path / "process.json").read_bytes())
    for change in ({"start_ticks": note["start_ticks"] - 1}, {"boot_id": "x"}, {"namespace": 1}):
        (tmp_path / "process.json").write_bytes(msgspec.json.encode(note | change))
        assert find_survivor(tmp_path) is None
    for garbage in (b"", b"\xff", b"{}", msgspec.json.encode(note | {"pid": 2**70})):
        (tmp_path / "process.json").write_bytes(garbage)
        assert find_survivor(tmp_path) is None
    note_process(tmp_path, orphan.pid)
    survivor = find_survivor(tmp_path)
    assert survivor is not None
    survivor.terminate()
    assert asyncio.run(survivor.wait()) == -signal.SIGTERM
    assert find_survivor(tmp_path) is None, "it is dead, though nobody has reaped it"


def test_a_guest_that_outlived_the_daemon_gives_way_first(tmp_path):
    clock = ManualClock()
    before = JobScheduler(JobsConfig(units=2), clock)
    for name, units in (("host", 2), ("guest", 1)):
        before.submit(JobSpec(job_id=name, tenant="t", units=units))
        before.plan()
        before.lend("host", 1)
    before.plan()
    now = JobScheduler.from_state(
        before.state(), JobsConfig(units=2), clock, alive={"host", "guest"}
    )
    assert {r.spec.job_id: (r.state, r.is_guest) for r in now.table()} == {
        "host": (JobState.RUNNING, False),
        "guest": (JobState.RUNNING, True),
    }
    assert [(a.kind.value, a.job_id) for a in now.plan()] == [("preempt", "guest")]


SPEC = {"job_id": "a", "tenant": "t", "units": 1, "priority": 0}


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"{}", b"\xff\x00", b"[" * 9000, b"[]", b'{"scheduler": {}}'),
        b'{"scheduler": {"version": 1}, "lines": {}}',
        b'{"scheduler": {"version": 2, "usage": {}, "jobs": []}, "lines": {}}',
        b'{"scheduler": {"version": 1, "usage": {}, "jobs": [1]}, "lines": {}}',
        msgspec.json.encode(
            {
                "scheduler": {"version": 1, "usage": {}, "jobs": [[SPEC, "queued", 1.0, 0]]},
                "lines": {},
            }
        ),
    ],
)
def test_a_damaged_list_of_jobs_is_one_line_and_stays_as_it_is(content, tmp_path):
    (tmp_path / "jobs.json").write_bytes(content)
    with pytest.raises(UserError):
        JobsDaemon(tmp_path, OFF, ManualClock())
    assert (tmp_path / "jobs.json").read_bytes() == content
    assert os.listdir(tmp_path) == ["jobs.json"]


@pytest.mark.parametrize(
    "words",
    [("--units", "-3"), ("--units", "0"), ("--lend-after", "1e-9"), ("--lend-after", "nan"), ()],
)
def test_what_cannot_be_served_is_one_line_with_a_fix(words, tmp_path, capsys):
    place = tmp_path / "file"
    place.write_text("mine")
    with pytest.raises(SystemExit) as ended:
        main(("jobs", "serve", "--directory", str(place), *words))
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "Fix:" in line
    assert "bug" not in line
    assert (words[0] if words else str(place)) in line
    assert place.read_text() == "mine"
