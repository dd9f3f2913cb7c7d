"""Nothing stays behind: after many boxes, after a killed owner, after a killed keeper."""

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
from burnish.core.errors import ClassifiedFailure, UserError
from burnish.sandbox.bubblewrap.pool import BubblewrapPool
from burnish.sandbox.config import SandboxConfig
from burnish.sandbox.interpreter import python_argv
from burnish.sandbox.proctree import Process, open_process, read_processes, start_ticks

OWNER = """
import asyncio, sys
from burnish.core.boxes import Limits
from burnish.sandbox.bubblewrap.pool import BubblewrapPool

async def main():
    pool = BubblewrapPool()
    async with pool.acquire() as box:
        code = "import os, time; os.fork(); print(1, flush=True); time.sleep(1000)"
        command = ("/usr/bin/python3", "-c", code)
        running = asyncio.create_task(box.exec(command, limits=Limits(wall_s=1000)))
        await box_is_busy(pool)
        print(pool.keeper_pid, flush=True)
        await running

async def box_is_busy(pool):
    from burnish.sandbox.proctree import read_processes, tree_usage
    # monitor, process 1 and two of Python
    while tree_usage(read_processes(), pool.keeper_pid).num_tasks < 4:
        await asyncio.sleep(0.01)

asyncio.run(main())
"""


@pytest.fixture
def pool() -> Iterator[BubblewrapPool]:
    try:
        made = BubblewrapPool(SandboxConfig(max_boxes=32))
    except UserError as error:
        pytest.skip(str(error))
    yield made
    asyncio.run(made.close())


def descendants(root: int) -> list[Process]:
    processes = read_processes()
    found, parents = [], {root}
    while new := [p for p in processes if p.parent in parents and p not in found]:
        found += new
        parents = {p.pid for p in new}
    return found


def open_files(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def mounts(pid: int) -> int:
    return len(Path(f"/proc/{pid}/mountinfo").read_text().splitlines())


def control_groups(keeper_pid: int) -> list[Path]:
    owner = f"-{keeper_pid}-"
    found = []
    for folder, names, _ in os.walk("/sys/fs/cgroup"):
        found += [Path(folder, name) for name in names if owner in folder or owner in name]
    return found


def state(pool: BubblewrapPool) -> tuple[int, int, int, int, int]:
    keeper = pool.keeper_pid
    return (
        len(descendants(keeper)),
        open_files(keeper),
        open_files(os.getpid()),
        mounts(keeper),
        len(control_groups(keeper)),
    )


async def use(pool: BubblewrapPool, number: int) -> None:
    async with pool.acquire() as box:
        kind = number % 5
        await box.write_file("f", b"x")
        if kind == 0:
            assert (await box.exec(("true",))).status is ExecStatus.OK
        elif kind == 1:
            result = await box.exec(("sh", "-c", "setsid sleep 1000 & exit 3"))
            assert result.status is ExecStatus.EXIT
        elif kind == 2:
            result = await box.exec(("yes",), limits=Limits(stdout_bytes=100))
            assert result.status is ExecStatus.OUTPUT
        elif kind == 3:
            running = asyncio.create_task(box.exec(("sleep", "1000")))
            await asyncio.sleep(0)
            running.cancel()
            await asyncio.wait((running,))


@pytest.mark.slow
def test_200_boxes_one_after_another_leave_nothing(pool: BubblewrapPool) -> None:
    async def main() -> None:
        await use(pool, 0)
        before = state(pool)
        for number in range(200):
            await use(pool, number)
        assert state(pool) == before

    asyncio.run(main())


def test_32_boxes_at_once_leave_nothing(pool: BubblewrapPool) -> None:
    async def main() -> None:
        await use(pool, 0)
        before = state(pool)
        async with asyncio.TaskGroup() as group:
            for number in range(64):
                group.create_task(use(pool, number))
        assert state(pool) == before

    asyncio.run(main())


def test_a_command_cancelled_with_its_box_is_gone_when_the_box_is(pool: BubblewrapPool) -> None:
    """The caller's cancellation and the box's own meet at any point of the command's start."""

    async def cancelled(pause_s: float) -> None:
        async with pool.acquire() as box:
            running = asyncio.create_task(box.exec(("sleep", "1000")))
            await asyncio.sleep(pause_s)
            running.cancel()
            await asyncio.wait((running,))

    async def main() -> None:
        await use(pool, 0)
        before = state(pool)
        for number in range(60):
            await cancelled(number % 20 * 0.0003)
            assert state(pool) == before

    asyncio.run(main())


def test_nothing_is_visible_on_the_host(pool: BubblewrapPool) -> None:
    def host() -> tuple[str, list[str]]:
        return Path("/proc/self/mountinfo").read_text(), os.listdir("/media")

    async def main() -> None:
        before = host()
        async with pool.acquire() as box:
            await box.write_file("f", b"x")
            assert host() == before

    asyncio.run(main())


def test_closing_leaves_nothing() -> None:
    pool = BubblewrapPool()
    keeper = pool.keeper_pid

    async def main() -> None:
        async with pool.acquire() as box:
            running = asyncio.create_task(box.exec(("sleep", "1000"), limits=Limits(wall_s=1000)))
            await asyncio.sleep(0)
            await pool.close()
            assert (await running).status is ExecStatus.INFRA_ERROR

    asyncio.run(main())
    assert start_ticks(keeper) == -1
    assert control_groups(keeper) == []


def start_owner() -> tuple["subprocess.Popen[str]", int, list[Process]]:
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    keeper = int(owner.stdout.readline())
    boxed = descendants(keeper)
    assert len(boxed) >= 4
    return owner, keeper, boxed


def wait_until_dead(processes: list[Process]) -> None:
    """Waits on each by pidfd; hangs, and so fails by the time limit of the run, if one lives."""
    for process in processes:
        descriptor = open_process(process.pid)
        if descriptor is None:
            continue
        try:
            if start_ticks(process.pid) == process.start_ticks:
                assert select.select([descriptor], [], [], 60)[0], f"{process} survived"
        finally:
            os.close(descriptor)


def test_a_killed_owner_takes_everything_with_it(pool: BubblewrapPool) -> None:
    owner, keeper, boxed = start_owner()
    keeper_process = next(p for p in read_processes() if p.pid == keeper)
    owner.kill()
    owner.wait()
    wait_until_dead([keeper_process, *boxed])
    assert control_groups(keeper) == []
    assert owner.stdout is not None
    owner.stdout.close()


def test_a_killed_keeper_takes_its_boxes_and_the_next_start_sweeps(pool: BubblewrapPool) -> None:
    owner, keeper, boxed = start_owner()
    os.kill(keeper, signal.SIGKILL)
    wait_until_dead(boxed)
    owner.wait(60)
    assert owner.returncode == 0  # exec said infra_error, nothing raised
    assert owner.stdout is not None
    owner.stdout.close()
    asyncio.run(BubblewrapPool().close())
    assert control_groups(keeper) == []


def test_a_pool_heals_after_its_keeper_was_killed(pool: BubblewrapPool) -> None:
    async def main() -> None:
        async with pool.acquire() as box:
            os.kill(pool.keeper_pid, signal.SIGKILL)
            result = await box.exec(("sleep", "1000"))
            assert result.status is ExecStatus.INFRA_ERROR
            with pytest.raises(ClassifiedFailure):
                await box.write_file("f", b"")
        async with pool.acquire() as box:
            assert (await box.exec(python_argv("-c", "pass"))).status is ExecStatus.OK

    asyncio.run(main())
