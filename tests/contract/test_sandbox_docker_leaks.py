"""Containers of a docker daemon are nobody's children: they go even so when their owner does."""

import asyncio
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from burnish.core.boxes import ExecStatus, Limits
from burnish.core.errors import UserError
from burnish.sandbox.config import SandboxConfig
from burnish.sandbox.engine.client import OWNER_LABEL, Docker, find_docker
from burnish.sandbox.engine.guard import sweep
from burnish.sandbox.engine.pool import DockerPool

pytestmark = pytest.mark.slow
OWNER = """
import asyncio
from burnish.core.boxes import Limits
from burnish.sandbox.engine.pool import DockerPool

async def main():
    pool = DockerPool()
    async with pool.acquire() as box:
        running = asyncio.create_task(box.exec(("sleep", "1000"), limits=Limits(wall_s=1000)))
        print(pool.keeper_pid, flush=True)
        await running

asyncio.run(main())
"""


@pytest.fixture
def docker() -> Docker:
    try:
        return find_docker()
    except UserError as error:
        pytest.skip(str(error))


@pytest.fixture
def pool(docker: Docker) -> Iterator[DockerPool]:
    made = DockerPool(SandboxConfig(max_boxes=4))
    yield made
    asyncio.run(made.close())


def containers(docker: Docker, keeper_pid: int) -> set[str]:
    shown = docker.call("ps", "-a", f"--filter=label={OWNER_LABEL}", "--format={{.Names}}")
    return {name for name in shown.split() if f"-{keeper_pid}-" in name}


def volumes(docker: Docker, keeper_pid: int) -> list[str]:
    label = f"--filter=label={OWNER_LABEL}"
    shown = docker.call("volume", "ls", label, "--format={{.Labels}}")
    return [line for line in shown.splitlines() if f"-{keeper_pid}-" in line]


def folders(keeper_pid: int) -> list[str]:
    return [name for name in os.listdir("/tmp") if f"-{keeper_pid}-" in name and "burnish" in name]


def test_boxes_leave_nothing_however_they_end(docker: Docker, pool: DockerPool) -> None:
    async def use(number: int) -> None:
        async with pool.acquire() as box:
            assert volumes(docker, pool.keeper_pid)
            await box.write_file("f", b"x")
            if number % 3 == 0:
                assert (await box.exec(("true",))).status is ExecStatus.OK
            elif number % 3 == 1:
                result = await box.exec(("sleep", "1000"), limits=Limits(wall_s=0.2))
                assert result.status is ExecStatus.TIMEOUT
            else:
                running = asyncio.create_task(box.exec(("sleep", "1000")))
                await asyncio.sleep(0)
                running.cancel()
                await asyncio.wait((running,))

    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            for number in range(6):
                group.create_task(use(number))

    asyncio.run(main())
    assert containers(docker, pool.keeper_pid) == set()
    assert volumes(docker, pool.keeper_pid) == []


@pytest.mark.parametrize("victim", ["owner", "keeper"])
def test_who_is_killed_takes_everything_with_it(docker: Docker, victim: str) -> None:
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    keeper = int(owner.stdout.readline())
    assert containers(docker, keeper)
    os.kill(owner.pid if victim == "owner" else keeper, signal.SIGKILL)
    owner.wait(60)
    owner.stdout.close()
    # The guard does it by itself; it hangs, and so fails by the time limit of the run, if not.
    while containers(docker, keeper) or folders(keeper):
        select.select([], [], [], 0.1)


def test_the_next_start_removes_what_even_the_guard_did_not(docker: Docker) -> None:
    made = DockerPool(SandboxConfig(max_boxes=1))
    gone = f"burnish-{os.stat('/proc/self/ns/pid').st_ino}-{made.keeper_pid}-1"
    image = docker.call("images", "--quiet", "--filter=label=burnish.image").split()[0]
    asyncio.run(made.close())
    docker.call("create", f"--name={gone}-x", f"--label={OWNER_LABEL}={gone}", image, "true")
    assert len(sweep(docker)) >= 1
    assert containers(docker, made.keeper_pid) == set()


def test_closing_removes_the_files_of_the_keeper(docker: Docker) -> None:
    made = DockerPool(SandboxConfig(max_boxes=1))
    assert folders(made.keeper_pid)
    asyncio.run(made.close())
    assert folders(made.keeper_pid) == []
    assert not Path(f"/proc/{made.keeper_pid}").exists()
