"""Interrupts and streams that take nothing: the exit status stays true, no traceback shows."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

COMMAND = [sys.executable, "-m", "burnish.cli.main"]
VERB = """
import os, signal
from burnish.run.execute import RunInterrupted
from burnish.cli import main, run
import burnish.run.local
from pathlib import Path

def start(*_, **__):
    try:
        os.kill(os.getpid(), signal.SIGINT)
        signal.pause()
    except KeyboardInterrupt:
        raise RunInterrupted(Path("runs/x")) from None

burnish.run.local.start = start
main.main(["run", "a.toml", *ARGUMENTS])
"""


@pytest.mark.parametrize("arguments", [[], ["--json"]])
def test_an_interrupted_run_says_how_to_go_on_and_exits_130(arguments: list[str]) -> None:
    code = VERB.replace("ARGUMENTS", repr(arguments))
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 130, done.stderr
    assert "--resume runs/x" in done.stderr
    assert "Traceback" not in done.stderr
    if arguments:
        error = json.loads(done.stdout)["error"]
        assert error["code"] == "interrupted"
        assert "--resume runs/x" in error["message"]


def test_the_first_interrupt_ends_an_episode() -> None:
    process = subprocess.Popen(
        [*COMMAND, "env", "play", "formatting"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A terminal shows lines at once, a pipe only when asked.
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    assert process.stdout is not None
    while "Your turn" not in process.stdout.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    # communicate() would close stdin, and the end of input also ends an episode.
    assert process.wait(timeout=60) == 130
    _, shown = process.communicate()
    assert "Traceback" not in shown


@pytest.mark.parametrize(
    "arguments", ["env list", "env list --json", "--help", "config explain run.steps"]
)
@pytest.mark.parametrize(
    ("redirection", "status"), [(">/dev/full", 2), (">&-", 0), ("2>&-", 0), (">&- 2>&-", 0)]
)
def test_output_that_goes_nowhere_is_no_bug(arguments: str, redirection: str, status: int) -> None:
    line = f"{' '.join(COMMAND)} {arguments} {redirection}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False)
    assert done.returncode == status, done.stderr
    assert "Traceback" not in done.stderr
    if status:
        assert done.stderr.startswith("burnish: stdout: No space left on device. Fix: ")
        assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("redirection", ["2>/dev/full", "2>&-", ">&-", ">/dev/full 2>/dev/full"])
def test_a_mistake_keeps_its_status_where_nobody_can_read_of_it(redirection: str) -> None:
    line = f"{' '.join(COMMAND)} report absent --json {redirection}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


def test_no_file_of_a_run_takes_the_place_of_a_closed_stdout(tmp_path: Path) -> None:
    code = (
        "from burnish.cli.main import _replace_closed_streams as r; import os, sys; r();"
        f"file = open({str(tmp_path / 'ledger')!r}, 'w'); print('noise'); assert file.fileno() > 2"
    )
    line = f'{sys.executable} -c "$CODE" >&-'
    done = subprocess.run(
        ["bash", "-c", line], env={**os.environ, "CODE": code}, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "ledger").read_bytes() == b""
