"""The suites again as a user without privileges: no control groups, one user id or a range."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from burnish.sandbox.interpreter import find_python

HERE = Path(__file__).parent
NOBODY = "65534"
SUBORDINATE = "nobody:1800000000:65536\n"
# Numbers of processes that no box has: suites ask boxes about a process of the host.
PAST_SMALL_PIDS = 'i=0; while [ $i -lt 500 ]; do (:); i=$((i+1)); done; "$@"'
# In a mount namespace of its own: the files of the host stay as they are.
WITH_RANGE = f"""
mount --bind "$0" /etc/subuid && mount --bind "$0" /etc/subgid || exit
{PAST_SMALL_PIDS}
"""
# What podman keeps running for a user ends with it.
OWN_NAMESPACES = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
POOLS = {
    "native": "native.pool import NativePool as Pool; options = ()",
    "bubblewrap": "bubblewrap.pool import BubblewrapPool as Pool; options = ()",
    "oci-crun": "oci.pool import OciPool as Pool; options = ('crun',)",
    "oci-runc": "oci.pool import OciPool as Pool; options = ('runc',)",
    "gvisor": "oci.pool import OciPool as Pool; options = ('runsc',)",
    "podman": "oci.pool import OciPool as Pool; options = ('podman',)",
}
"""Backends that may run for an ordinary user, by the names that the suites give them."""
PYTEST = [
    *("-m", "pytest", "-v", "--tb=short", "-p", "no:cacheprovider", "-c", os.devnull),
    *("--import-mode=importlib", "--rootdir", str(HERE)),
]
TRY = """
import asyncio
from burnish.core.errors import UserError
from burnish.sandbox.config import SandboxConfig
from burnish.sandbox.{pool}
try:
    asyncio.run(Pool(SandboxConfig(), *options).close())
    print("{name}")
except UserError:
    pass
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
    "test_sandbox_helper_fuzz.py",
    "test_sandbox_leaks.py",
    "test_sandbox_limits_contract.py",
    "test_sandbox_native_leaks.py",
    "test_sandbox_network_contract.py",
    "test_sandbox_network_phases.py",
    "test_sandbox_oci_images.py",
    "test_sandbox_oci_leaks.py",
    "test_sandbox_state_contract.py",
    "test_sandbox_state_owners.py",
]
# Their long rounds do nothing for a user that they do not do for root; root runs them.
OPTIONS = {
    "test_sandbox_helper_fuzz.py": ("-m", "not slow"),
    "test_sandbox_leaks.py": ("-m", "not slow"),
    "test_sandbox_native_leaks.py": ("-m", "not slow"),
    "test_sandbox_oci_leaks.py": ("-k", "crun"),
}
# What they are about is offered by some backends only, or they name these in another way.
PARTIAL_SUITES = {
    "test_sandbox_helper_fuzz.py",
    "test_sandbox_leaks.py",
    "test_sandbox_native_leaks.py",
    "test_sandbox_oci_images.py",
    "test_sandbox_oci_leaks.py",
    "test_sandbox_escape_layers.py",
    "test_sandbox_network_phases.py",
    "test_sandbox_state_contract.py",
    "test_sandbox_state_owners.py",
}
# Of backends that take another way if the user has subordinate ids.
RANGED_SUITES = [
    "test_sandbox_contract.py",
    "test_sandbox_escape.py",
    "test_sandbox_network_contract.py",
    "test_sandbox_network_phases.py",
    "test_sandbox_state_contract.py",
    "test_sandbox_state_owners.py",
]


@pytest.fixture
def ordinary() -> list[str]:
    """A command that runs Python as an ordinary user."""
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
    return [*become, python]


def environment(home: str = "") -> dict[str, str]:
    paths = os.pathsep.join(os.path.abspath(path) for path in sys.path if path)
    # Ours are root's, and closed to the user.
    own = {"HOME": home, "XDG_RUNTIME_DIR": home} if home else {}
    return {**os.environ, "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1", **own}


@pytest.fixture
def home() -> Iterator[str]:
    """A directory of the user's own; not below pytest's, which are closed to others."""
    with tempfile.TemporaryDirectory() as folder:
        os.chown(folder, int(NOBODY), int(NOBODY))
        yield folder


def check(before: list[str], python: list[str], suite: str, home: str, *, select: str = "") -> None:
    """Run a suite; whatever it can run on for this user has passed some of it."""

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*before, *python, *arguments],
            env=environment(home),
            cwd="/",
            capture_output=True,
            text=True,
            check=False,
        )

    tries = "".join(TRY.format(name=name, pool=pool) for name, pool in POOLS.items())
    tried = run("-c", tries)
    assert tried.returncode == 0, tried.stderr[-2000:]
    there = set(tried.stdout.split())
    selected = ["-k", select] if select else OPTIONS.get(suite, ())
    result = run(*PYTEST, str(HERE / suite), *selected)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-1000:]
    ended = re.findall(r"^\S+::\w+\[(\S[^\]]*)\] (PASSED|SKIPPED)", result.stdout, re.MULTILINE)
    for name in there & {"native"} if suite in PARTIAL_SUITES else there:
        of_it = [how for found, how in ended if f"-{name}-" in f"-{found}-"]
        assert not of_it or "PASSED" in of_it, f"all of {name} was skipped"
    known = [found for found, _ in ended if any(f"-{name}-" in f"-{found}-" for name in there)]
    if ended and not known:
        pytest.skip(f"nothing that {suite} runs on is there for an ordinary user")
    assert " passed" in result.stdout


@pytest.mark.slow
@pytest.mark.parametrize("suite", SUITES)
def test_everything_holds_for_an_ordinary_user(ordinary: list[str], suite: str, home: str) -> None:
    before = [*OWN_NAMESPACES, "sh", "-c", PAST_SMALL_PIDS, "sh"]
    check(before, ordinary, suite, home)


@pytest.mark.slow
@pytest.mark.parametrize("suite", RANGED_SUITES)
def test_everything_holds_with_subordinate_ids(
    ordinary: list[str], suite: str, home: str, tmp_path: Path
) -> None:
    if shutil.which("newuidmap") is None:
        pytest.skip("needs newuidmap: install uidmap")
    ranges = tmp_path / "ranges"
    ranges.write_text(SUBORDINATE)
    before = [*OWN_NAMESPACES, "sh", "-c", WITH_RANGE, str(ranges)]
    check(before, ordinary, suite, home, select="native or remote or podman")
