"""Containers leave nothing: after many boxes, a killed owner, a killed keeper, a stuck runtime."""

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
from burnish.sandbox.config import SandboxConfig
from burnish.sandbox.oci.pool import OciPool
from burnish.sandbox.proctree import Process, open_process, read_processes, start_ticks

OWNER = """
import asyncio, sys
from burnish.core.boxes import Limits
from burnish.sandbox.oci.pool import OciPool

async def main():
    pool = OciPool(runtime=sys.argv[1])
    async with pool.acquire() as box:
        print(pool.keeper_pid, flush=True)
        code = "import os, time; os.fork(); print(1, flush=True); time.sleep(1000)"
        await box.exec(("python3", "-c", code), limits=Limits(wall_s=1000))

asyncio.run(main())
"""
RUNTIMES = [
    "crun",
    pytest.param("runc", marks=pytest.mark.slow),
    pytest.param("runsc", marks=pytest.mark.slow),
    pytest.param("podman", marks=pytest.mark.slow),
]


@pytest.fixture(params=RUNTIMES)
def pool(request: pytest.FixtureRequest) -> Iterator[OciPool]:
    try:
        made = OciPool(SandboxConfig(max_boxes=8), request.param)
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


def control_groups(keeper_pid: int) -> list[Path]:
    owner = f"-{keeper_pid}-"
    found = []
    for folder, names, _ in os.walk("/sys/fs/cgroup"):
        found += [Path(folder, name) for name in names if owner in folder or owner in name]
    return found


def state(pool: OciPool) -> tuple[int, int, int, int]:
    """Processes, open files and mounts of the keeper proper, control groups."""
    (keeper,) = [p.pid for p in read_processes() if p.parent == pool.keeper_pid]
    return (
        len([process for process in descendants(keeper) if not process.dead]),
        len(os.listdir(f"/proc/{keeper}/fd")),
        len(Path(f"/proc/{keeper}/mountinfo").read_text().splitlines()),
        len(control_groups(pool.keeper_pid)),
    )


async def use(pool: OciPool, number: int) -> None:
    async with pool.acquire() as box:
        await box.write_file("f", b"x")
        kind = number % 4
        if kind == 0:
            assert (await box.exec(("true",))).status is ExecStatus.OK
        elif kind == 1:
            result = await box.exec(("sh", "-c", "setsid sleep 1000 & exit 3"))
            assert result.status is ExecStatus.EXIT
        elif kind == 2:
            result = await box.exec(("yes",), limits=Limits(stdout_bytes=100))
            assert result.status is ExecStatus.OUTPUT
        else:
            running = asyncio.create_task(box.exec(("sleep", "1000")))
            await asyncio.sleep(number % 7 * 0.003)
            running.cancel()
            await asyncio.wait((running,))


def test_boxes_one_after_another_and_at_once_leave_nothing(pool: OciPool) -> None:
    async def main() -> None:
        await use(pool, 0)
        before = state(pool)
        for number in range(12):
            await use(pool, number)
        async with asyncio.TaskGroup() as group:
            for number in range(16):
                group.create_task(use(pool, number))
        assert state(pool) == before

    asyncio.run(main())


def left_in_tmp() -> set[str]:
    return {name for name in os.listdir("/tmp") if name.startswith(("crun", "runc", "runsc"))}


def test_boxes_that_end_before_they_began_leave_nothing(pool: OciPool) -> None:
    async def main() -> None:
        await use(pool, 0)
        before, files = state(pool), left_in_tmp()
        for number in range(40):
            async with pool.acquire():
                for _ in range(number % 8):
                    await asyncio.sleep(0)
        assert left_in_tmp() - files == set()
        assert state(pool) == before

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


def busy_owner(runtime: str) -> tuple["subprocess.Popen[str]", int, list[Process]]:
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, runtime], stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout is not None
    keeper = int(owner.stdout.readline())
    while len([p for p in descendants(keeper) if is_running_python(p)]) < 1:
        select.select([], [], [], 0.01)
    owner.stdout.close()
    return owner, keeper, descendants(keeper)


def command_line(pid: int) -> bytes:
    """Empty if it ended meanwhile."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


def is_running_python(process: Process) -> bool:
    """Or what gVisor shows of it."""
    line = command_line(process.pid)
    return b"time.sleep(1000)" in line or line.startswith(b"runsc-sandbox")


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("victim", ["owner", "keeper", "process 1"])
def test_who_is_killed_takes_everything_with_it(runtime: str, victim: str) -> None:
    try:
        asyncio.run(OciPool(runtime=runtime).close())
    except UserError as error:
        pytest.skip(str(error))
    owner, keeper, boxed = busy_owner(runtime)
    (process_1,) = [p.pid for p in boxed if p.parent == keeper]
    os.kill({"owner": owner.pid, "keeper": keeper, "process 1": process_1}[victim], signal.SIGKILL)
    wait_until_dead(boxed)
    owner.wait(60)
    asyncio.run(OciPool(runtime=runtime).close())
    assert control_groups(keeper) == []


def test_a_pool_heals_after_its_keeper_was_killed(pool: OciPool) -> None:
    async def main() -> None:
        async with pool.acquire() as box:
            os.kill(pool.keeper_pid, signal.SIGKILL)
            assert (await box.exec(("sleep", "1000"))).status is ExecStatus.INFRA_ERROR
            with pytest.raises(ClassifiedFailure):
                await box.write_file("f", b"")
        async with pool.acquire() as box:
            assert (await box.exec(("true",))).status is ExecStatus.OK

    asyncio.run(main())


@pytest.mark.slow
def test_a_stuck_runtime_is_killed_and_leaves_nothing(pool: OciPool) -> None:
    async def main() -> None:
        await use(pool, 0)
        before = state(pool)
        async with pool.acquire() as box:
            limits = Limits(wall_s=2.0)
            running = asyncio.create_task(box.exec(("sleep", "1000"), limits=limits))
            for monitor in await asyncio.to_thread(wait_for_monitors, pool):
                os.kill(monitor, signal.SIGSTOP)
            result = await running
            assert result.status in (ExecStatus.TIMEOUT, ExecStatus.INFRA_ERROR)
        assert state(pool) == before

    asyncio.run(main())


def wait_for_monitors(pool: OciPool) -> list[int]:
    while not (monitors := monitors_of(pool)):
        select.select([], [], [], 0.01)
    return monitors


def monitors_of(pool: OciPool) -> list[int]:
    """Runtimes whose container runs `sleep`, or the sentry."""
    everyone = {process.pid: process for process in descendants(pool.keeper_pid)}
    names = {pid: command_line(pid) for pid in everyone}
    found = []
    for pid, line in names.items():
        busy = line.startswith((b"sleep\x001000", b"runsc-sandbox"))
        above = everyone[pid].parent
        while busy and above in everyone:
            if b"/run-" in names[above] and b"--root" in names[above]:
                found.append(above)
                break
            above = everyone[above].parent
    return found


def test_closing_ends_what_runs() -> None:
    try:
        pool = OciPool(SandboxConfig(max_boxes=1))
    except UserError as error:
        pytest.skip(str(error))

    async def main() -> None:
        async with pool.acquire() as box:
            running = asyncio.create_task(box.exec(("sleep", "1000"), limits=Limits(wall_s=1000)))
            await asyncio.sleep(0)
            await pool.close()
            assert (await running).status is ExecStatus.INFRA_ERROR

    asyncio.run(main())
    assert start_ticks(pool.keeper_pid) == -1
    assert control_groups(pool.keeper_pid) == []
