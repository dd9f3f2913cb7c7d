"""Native boxes leave nothing: after kills at random, cancellation at any point, killed owners."""

import asyncio
import contextlib
import gc
import os
import select
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from box_kills import control_groups, cycles, descendants, held, kill_cycles

from burnish.core.boxes import ExecStatus, Limits, Policy
from burnish.core.errors import ClassifiedFailure, UserError
from burnish.sandbox.config import SandboxConfig
from burnish.sandbox.native.pool import NativePool
from burnish.sandbox.native.room import _files_per_box
from burnish.sandbox.native.run import Run
from burnish.sandbox.proctree import Process, open_process, read_processes, start_ticks

OWNER = """
import asyncio, sys
from burnish.core.boxes import Limits
from burnish.sandbox.config import SandboxConfig
from burnish.sandbox.native.pool import NativePool
from burnish.sandbox.proctree import read_processes, tree_usage

async def main():
    pool = NativePool(SandboxConfig(helper=sys.argv[1]))
    async with pool.acquire() as box:
        await box.write_file("f", b"x")
        await box.snapshot()
        command = ("sh", "-c", "sleep 1000 & echo; sleep 1000")
        running = asyncio.create_task(box.exec(command, limits=Limits(wall_s=1000)))
        # Process 1, a shell, two that sleep; the child that the C helper makes ahead.
        num_tasks = 4 + (sys.argv[1] == "c")
        while tree_usage(read_processes(), pool.helper_pids[0]).num_tasks < num_tasks:
            await asyncio.sleep(0.01)
        print(*pool.helper_pids, flush=True)
        await running

asyncio.run(main())
"""

_FDS_OF_A_LOOP = 5


@pytest.fixture(params=["c", "python", "c-disk"])
def pool(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[NativePool]:
    helper, _, storage = request.param.partition("-")
    config = {"max_boxes": 8, "warm_boxes": 2, "helper": helper, "storage": storage or "memory"}
    try:
        made = NativePool(SandboxConfig.model_validate({**config, "storage_directory": tmp_path}))
    except UserError as error:
        pytest.skip(str(error))
    yield made
    asyncio.run(made.close())
    while loop_devices(tmp_path):
        continue


def loop_devices(folder: Path) -> list[str]:
    """The files behind those that are over files of a directory."""
    found = []
    for path in Path("/sys/block").glob("loop*/loop/backing_file"):
        with contextlib.suppress(OSError):
            found.append(path.read_text())
    return [name for name in found if name.startswith(f"{folder}/")]


def check_cycles(pool: NativePool, count: int) -> None:
    before, after, killed = kill_cycles(pool, count)
    assert after == before
    assert min(killed["boxes"], killed["helpers"]) > 0, killed


def test_random_kills_leave_nothing(pool: NativePool) -> None:
    check_cycles(pool, 120)


@pytest.mark.slow
def test_thousands_of_cycles_with_random_kills_leave_nothing(pool: NativePool) -> None:
    # The helper in Python, and disks, take many times as long.
    is_quick = pool._config.helper == "c" and pool._config.storage == "memory"
    check_cycles(pool, 10_000 if is_quick else 500)


def test_many_boxes_need_no_more_files_than_is_checked_at_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("burnish.sandbox.native.stations.make_room", lambda *_, on_disk: False)
    count = 12
    pool = NativePool(SandboxConfig(max_boxes=count, warm_boxes=0))

    async def main() -> int:
        async with pool.acquire_many(count) as boxes:
            await asyncio.gather(*(box.exec(("true",)) for box in boxes))
            running = [asyncio.create_task(box.exec(("sleep", "1000"))) for box in boxes]
            await asyncio.sleep(0)  # all are started
            most = len(os.listdir("/proc/self/fd"))
            for task in running:
                task.cancel()
            await asyncio.wait(running)
            return most

    before = len(os.listdir("/proc/self/fd"))
    try:
        assert (
            asyncio.run(main())
            <= before + count * _files_per_box(pool._stations.controllers) + _FDS_OF_A_LOOP
        )
    finally:
        asyncio.run(pool.close())


def test_a_cancelled_command_leaves_none_of_its_output_in_memory(pool: NativePool) -> None:
    def runs() -> list[Run]:
        return [found for found in gc.get_objects() if type(found) is Run]

    async def main() -> int:
        async with pool.acquire() as box:
            running = asyncio.create_task(box.exec(("sleep", "1000")))
            while not runs():  # noqa: ASYNC110 - nothing tells of it
                await asyncio.sleep(0)
            running.cancel()
            await asyncio.wait((running,))
            del running
            await asyncio.sleep(0)
            return len(runs())

    gc.collect()
    gc.disable()
    try:
        assert asyncio.run(main()) == 0
    finally:
        gc.enable()


def test_an_acquire_cancelled_at_any_point_leaks_nothing(pool: NativePool) -> None:
    async def cancelled(pause_s: float, policy: Policy) -> None:
        async def hold_one() -> None:
            async with pool.acquire(policy=policy) as box:
                await box.exec(("sleep", "1000"))

        task = asyncio.create_task(hold_one())
        await asyncio.sleep(pause_s)
        task.cancel()
        await asyncio.wait((task,))

    async def all_pauses() -> None:
        for number in range(60):
            await cancelled(number % 30 * 0.0002, Policy(deterministic=number % 2 == 0))

    asyncio.run(cycles(pool, 3, 1, Counter()))
    before = held(pool)
    asyncio.run(all_pauses())
    assert held(pool) == before


def test_a_loop_that_ends_while_boxes_are_made_does_not_break_the_next(pool: NativePool) -> None:
    async def leave_early() -> None:
        task = asyncio.create_task(pool.acquire(policy=Policy(deterministic=True)).__aenter__())
        await asyncio.sleep(0)
        task.cancel()

    async def main() -> ExecStatus:
        async with pool.acquire() as box:
            return (await box.exec(("true",))).status

    before = held(pool)
    for _ in range(20):
        asyncio.run(leave_early())
        assert asyncio.run(main()) is ExecStatus.OK
    assert held(pool) == before


def test_a_pool_heals_after_its_helper_was_killed(pool: NativePool) -> None:
    async def main() -> None:
        async with pool.acquire() as box:
            running = asyncio.create_task(box.exec(("sleep", "1000")))
            await asyncio.sleep(0)
            os.kill(pool.helper_pids[0], signal.SIGKILL)
            assert (await running).status is ExecStatus.INFRA_ERROR
            assert (await box.exec(("true",))).status is ExecStatus.INFRA_ERROR
            with pytest.raises(ClassifiedFailure):
                await box.write_file("f", b"")
            async with pool.acquire() as other:
                assert (await other.exec(("true",))).status is ExecStatus.OK

    asyncio.run(main())
    assert pool.stats().helpers_lost == 1
    assert pool.stats().live == 0


def test_a_batch_is_made_by_a_new_helper_if_the_old_one_was_killed(pool: NativePool) -> None:
    async def main() -> None:
        os.kill(pool.helper_pids[0], signal.SIGKILL)
        async with pool.acquire_many(3) as boxes:
            for box in boxes:
                assert (await box.exec(("true",))).status is ExecStatus.OK

    asyncio.run(main())
    assert pool.stats().live == 0


def test_snapshots_of_a_killed_helper_are_refused_with_a_reason(pool: NativePool) -> None:
    async def main() -> None:
        async with pool.acquire() as box:
            await box.write_file("f", b"x")
            snapshot = await box.snapshot()
        helper = [p for p in read_processes() if p.pid == pool.helper_pids[0]]
        os.kill(helper[0].pid, signal.SIGKILL)
        wait_until_dead(helper)
        async with pool.acquire() as box:
            with pytest.raises(UserError, match="no snapshot"):
                await box.rollback(snapshot)

    asyncio.run(main())


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


@pytest.mark.parametrize("helper", ["c", "python"])
def test_a_killed_owner_takes_everything_with_it_and_the_next_start_sweeps(helper: str) -> None:
    command = [sys.executable, "-c", OWNER, helper]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        try:
            line = owner.stdout.readline()
            if not line:
                pytest.skip("native boxes do not run here: see burnish doctor")
            helper_pid = int(line.split()[0])
            boxed = descendants(helper_pid)
            keeper = next(p for p in read_processes() if p.pid == helper_pid)
            assert len(boxed) >= 4
        finally:
            owner.kill()
    wait_until_dead([keeper, *boxed])
    asyncio.run(NativePool(SandboxConfig(helper=helper)).close())
    assert control_groups(owner.pid) == []


def test_closing_leaves_nothing() -> None:
    try:
        pool = NativePool(SandboxConfig())
    except UserError as error:
        pytest.skip(str(error))
    files = len(os.listdir("/proc/self/fd"))
    helper = pool.helper_pids[0]
    mounts = Path("/proc/self/mountinfo").read_text()

    async def main() -> None:
        async with pool.acquire() as box:
            running = asyncio.create_task(box.exec(("sleep", "1000"), limits=Limits(wall_s=1000)))
            await asyncio.sleep(0)
            await pool.close()
            assert (await running).status is ExecStatus.INFRA_ERROR

    asyncio.run(main())
    assert start_ticks(helper) == -1
    assert control_groups(os.getpid()) == []
    assert len(os.listdir("/proc/self/fd")) < files
    assert Path("/proc/self/mountinfo").read_text() == mounts
