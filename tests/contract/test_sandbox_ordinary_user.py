"""The suites again as a user without privileges: no control groups, no user ids of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from burnish.sandbox.interpreter import find_python

HERE = Path(__file__).parent
NOBODY = "65534"
SUITES = [
    "test_sandbox_contract.py",
    "test_sandbox_escape.py",
    "test_sandbox_escape_resources.py",
    "test_sandbox_limits_contract.py",
]


@pytest.mark.slow
@pytest.mark.parametrize("suite", SUITES)
def test_everything_holds_for_an_ordinary_user(suite: str) -> None:
    python = find_python()
    if os.getuid() != 0 or python is None:
        pytest.skip("needs root, to become somebody else, and the system's python3")
    version = f"import sys; sys.exit(sys.version_info[:2] != {sys.version_info[:2]})"
    if subprocess.run([python, "-c", version], check=False).returncode:
        pytest.skip("the system's python3 is another version than ours")
    become = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
    paths = os.pathsep.join(os.path.abspath(path) for path in sys.path if path)
    can_read = [*become, python, "-c", "import pytest, burnish.sandbox.bubblewrap.pool"]
    environment = {**os.environ, "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"}
    if subprocess.run(can_read, env=environment, cwd="/", check=False).returncode:
        pytest.skip("an ordinary user cannot read this installation")
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += ["-c", os.devnull, "--import-mode=importlib", "--rootdir", str(HERE)]
    result = subprocess.run(
        [*become, *command, str(HERE / suite)],
        env=environment,
        cwd="/",
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-1000:]
    assert " passed" in result.stdout
