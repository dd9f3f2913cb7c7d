"""The start and the end of a native pool, on machines that lack something."""

import asyncio
import shutil
import subprocess
import sys

import pytest

from burnish.core.boxes import Policy
from burnish.core.errors import UserError
from burnish.sandbox.config import SandboxConfig
from burnish.sandbox.native import stations
from burnish.sandbox.native.pool import NativePool
from burnish.sandbox.network.base import Attachment, Listen

START = """
import sys
from burnish.core.errors import UserError
from burnish.sandbox.config import SandboxConfig
from burnish.sandbox.native.pool import NativePool
try:
    NativePool(SandboxConfig(max_boxes=1, helper=sys.argv[1]))
except UserError as error:
    print(error.what)
    print(error.fix)
"""


@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs util-linux")
@pytest.mark.parametrize("helper", ["c", "python"])
@pytest.mark.parametrize(
    ("limits", "fix"),
    [
        ({"max_user_namespaces": 0}, "sudo sysctl -w user.max_user_namespaces"),
        ({"max_mnt_namespaces": 1}, "end other sandboxes, or raise"),
        ({"max_pid_namespaces": 0}, "end other sandboxes, or raise"),
    ],
)
def test_a_machine_without_namespaces_is_named_with_the_fix(
    helper: str, limits: dict[str, int], fix: str
) -> None:
    # In a user namespace of its own, whose limits are not the machine's.
    words = [f"echo {value} > /proc/sys/user/{name}" for name, value in limits.items()]
    script = " && ".join([*words, 'exec "$0" -c "$1" "$2"'])
    result = subprocess.run(
        ["unshare", "--user", "--map-root-user", "sh", "-c", script, sys.executable, START, helper],
        capture_output=True,
        text=True,
        check=False,
    )
    if result.returncode == 1 and "unshare" in result.stderr:
        pytest.skip(f"no user namespace to try it in: {result.stderr}")
    assert result.returncode == 0, result.stderr
    what, shown = result.stdout.splitlines()
    assert "sandbox" in what or "boxes" in what
    assert shown.startswith(fix)


@pytest.mark.parametrize("program", ["exit 1", "echo no luck >&2; exit 3", "kill -9 $$"])
def test_a_helper_that_dies_at_its_start_is_a_problem_of_the_machine(
    monkeypatch: pytest.MonkeyPatch, program: str
) -> None:
    monkeypatch.setattr(stations, "helper_command", lambda kind: ("/bin/sh", "-c", program))
    with pytest.raises(UserError, match="native sandbox") as caught:
        NativePool(SandboxConfig(max_boxes=1))
    assert caught.value.fix


class Network:
    """Counts how often it is closed."""

    def __init__(self) -> None:
        self.num_closed = 0

    def check(self, allow: tuple[str, ...]) -> None:
        raise AssertionError("no box has a list")

    async def attach(self, listen: Listen, policy: Policy, box_id: str) -> Attachment:
        raise AssertionError("no box has a list")

    async def close(self) -> None:
        self.num_closed += 1


def test_a_pool_closes_the_network_that_it_was_given() -> None:
    network = Network()
    try:
        pool = NativePool(SandboxConfig(max_boxes=1), network=network)
    except UserError as error:
        pytest.skip(str(error))
    assert network.num_closed == 0
    asyncio.run(pool.close())
    assert network.num_closed > 0
    asyncio.run(pool.close())


@pytest.mark.parametrize("helper", ["c", "python"])
def test_a_pool_started_under_a_strict_umask_runs_boxes(helper: str) -> None:
    """Daemons set one; what a helper makes is for jobs of other users all the same."""
    script = 'umask 077 && exec "$0" -c "$1" "$2"'
    result = subprocess.run(
        ["sh", "-c", script, sys.executable, START, helper],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (result.returncode, result.stdout) == (0, ""), result.stderr
