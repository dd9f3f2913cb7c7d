"""The suites again as a user without privileges: no control groups, one user id or a range."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from burnish.sandbox.interpreter import find_python

HERE = Path(__file__).parent
NOBODY = "65534"
SUBORDINATE = "nobody:1800000000:65536\n"
# In a mount namespace of its own: the files of the host stay as they are.
WITH_RANGE = """
mount --bind "$0" /etc/subuid && mount --bind "$0" /etc/subgid && exec "$@"
"""
SUITES = [
    "test_sandbox_contract.py",
    "test_sandbox_escape.py",
    "test_sandbox_escape_control.py",
    "test_sandbox_escape_files.py",
    "test_sandbox_escape_kernel.py",
    "test_sandbox_escape_layers.py",
    "test_sandbox_escape_neighbours.py",
    "test_sandbox_escape_resources.py",
    "test_sandbox_limits_contract.py",
    "test_sandbox_network_phases.py",
    "test_sandbox_state_contract.py",
    "test_sandbox_state_owners.py",
]
# Of backends that take another way if the user has subordinate ids.
RANGED_SUITES = [
    "test_sandbox_contract.py",
    "test_sandbox_escape.py",
    "test_sandbox_state_contract.py",
    "test_sandbox_state_owners.py",
]


@pytest.fixture
def ordinary() -> list[str]:
    """A command that runs pytest as an ordinary user."""
    python = find_python()
    if os.getuid() != 0 or python is None:
        pytest.skip("needs root, to become somebody else, and the system's python3")
    version = f"import sys; sys.exit(sys.version_info[:2] != {sys.version_info[:2]})"
    if subprocess.run([python, "-c", version], check=False).returncode:
        pytest.skip("the system's python3 is another version than ours")
    become = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
    can_read = [*become, python, "-c", "import pytest, burnish.sandbox.bubblewrap.pool"]
    if subprocess.run(can_read, env=environment(), cwd="/", check=False).returncode:
        pytest.skip("an ordinary user cannot read this installation")
    command = [*become, python, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    return [*command, "-c", os.devnull, "--import-mode=importlib", "--rootdir", str(HERE)]


def environment() -> dict[str, str]:
    paths = os.pathsep.join(os.path.abspath(path) for path in sys.path if path)
    return {**os.environ, "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"}


def check(command: list[str]) -> None:
    result = subprocess.run(
        command, env=environment(), cwd="/", capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-1000:]
    assert " passed" in result.stdout


@pytest.mark.slow
@pytest.mark.parametrize("suite", SUITES)
def test_everything_holds_for_an_ordinary_user(ordinary: list[str], suite: str) -> None:
    check([*ordinary, str(HERE / suite)])


@pytest.mark.slow
@pytest.mark.parametrize("suite", RANGED_SUITES)
def test_everything_holds_with_subordinate_ids(
    ordinary: list[str], suite: str, tmp_path: Path
) -> None:
    if shutil.which("newuidmap") is None:
        pytest.skip("needs newuidmap: install uidmap")
    ranges = tmp_path / "ranges"
    ranges.write_text(SUBORDINATE)
    command = [*ordinary, str(HERE / suite), "-k", "native or remote"]
    check(["unshare", "--mount", "sh", "-c", WITH_RANGE, str(ranges), *command])
