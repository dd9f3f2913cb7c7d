"""What boxes that write to a disk do beyond the suites that all backends pass."""

import asyncio
import fcntl
import hashlib
import os
import signal
import struct
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from burnish.core.boxes import ExecResult, ExecStatus, Feature, Limits
from burnish.core.errors import ClassifiedFailure, UserError
from burnish.sandbox.config import SandboxConfig
from burnish.sandbox.interpreter import python_argv
from burnish.sandbox.native.disk_storage import open_uppers
from burnish.sandbox.native.pool import NativePool
from burnish.sandbox.native.stateful import NativeBox

MIB = 2**20
Use = Callable[[NativeBox], Coroutine[Any, Any, Any]]


def disk_pool(directory: Path, **options: Any) -> NativePool:
    fields = {"storage": "disk", "storage_directory": directory, "warm_boxes": 0, **options}
    try:
        return NativePool(SandboxConfig.model_validate(fields))
    except UserError as error:
        pytest.skip(str(error))


@pytest.fixture(params=["c", "python", "sampled"])
def pool(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[NativePool]:
    sampled = request.param == "sampled"
    helper = "auto" if sampled else request.param
    made = disk_pool(tmp_path, helper=helper, control_groups=not sampled)
    yield made
    asyncio.run(made.close())
    assert loops_over(tmp_path) == []


def loops_over(folder: Path) -> list[str]:
    found = []
    for path in Path("/sys/block").glob("loop*/loop/backing_file"):
        try:
            name = path.read_text()
        except OSError:
            continue
        found += [name] if name.startswith(str(folder)) else []
    return found


def in_box(pool: NativePool, use: Use) -> Any:
    async def main() -> Any:
        async with pool.acquire() as box:
            return await use(box)

    return asyncio.run(main())


async def sh(box: NativeBox, script: str, **limits: Any) -> ExecResult:
    fields = {"wall_s": 120, "cpu_s": 120, **limits}
    return await box.exec(("sh", "-c", script), limits=Limits(**fields))


def test_a_job_writes_many_times_its_memory(pool: NativePool) -> None:
    assert Feature.DISK_STORAGE in pool.capabilities.features
    room, memory = 128 * MIB, 32 * MIB
    script = "head -c 104857600 /dev/zero | tee f | md5sum; md5sum < f"

    async def use(box: NativeBox) -> ExecResult:
        return await sh(box, script, disk_bytes=room, memory_bytes=memory)

    result = in_box(pool, use)
    assert result.status is ExecStatus.OK, result
    digest = hashlib.md5(bytes(100 * MIB), usedforsecurity=False).hexdigest()
    assert result.stdout.decode() == f"{digest}  -\n" * 2
    assert result.usage.peak_memory_bytes is not None
    assert result.usage.peak_memory_bytes <= memory + 4 * MIB


def test_disk_and_inodes_bite_and_a_change_of_size_keeps_the_files(pool: NativePool) -> None:
    async def use(box: NativeBox) -> None:
        fill = "echo kept > a; head -c 20000000 /dev/zero > big"
        assert (await sh(box, fill, disk_bytes=8 * MIB)).status is ExecStatus.DISK
        assert (await sh(box, f"cat a; {fill}", disk_bytes=32 * MIB)).stdout == b"kept\n"
        # What is there does not fit, which is said, and nothing is lost.
        refused = await sh(box, "true", disk_bytes=8 * MIB)
        assert refused.status is ExecStatus.DISK
        assert "already holds more" in refused.message
        last = await sh(box, "cat a; rm big; ls", disk_bytes=32 * MIB)
        assert last.stdout == b"kept\na\n"
        many = "i=0; while echo > f$i; do i=$((i+1)); done; exit 1"
        assert (await sh(box, many, num_inodes=100)).status is ExecStatus.DISK

    in_box(pool, use)


def test_a_size_does_not_change_under_kept_processes(pool: NativePool) -> None:
    async def use(box: NativeBox) -> None:
        await box.exec(("sh", "-c", "sleep 1000 &"), keep=True)
        with pytest.raises(UserError, match="disk_bytes cannot change while kept processes run"):
            await sh(box, "true", disk_bytes=2 * Limits().disk_bytes)

    in_box(pool, use)


WRITE = """
import os, time
start = time.monotonic()
with open("/work/f", "wb", buffering=0) as file:
    for _ in range(32): file.write(bytes(1 << 16))
    os.fsync(file)
print(time.monotonic() - start)
"""
READ = """
import os, time
file = os.open("/work/f", os.O_RDONLY)
os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
start = time.monotonic()
while os.read(file, 1 << 16): pass
print(time.monotonic() - start)
"""


def test_rates_hold_for_the_disk_of_the_box_whatever_disk_that_is(pool: NativePool) -> None:
    if not {"read_bytes_per_s", "write_bytes_per_s"} <= pool.capabilities.enforces:
        pytest.skip("no block I/O control group")

    async def took_s(box: NativeBox, code: str, **limits: Any) -> float:
        result = await box.exec(python_argv("-c", code), limits=Limits(**limits))
        assert result.status is ExecStatus.OK, result
        return float(result.stdout)

    async def use(box: NativeBox) -> None:
        rate = 4 * MIB
        assert await took_s(box, WRITE, write_bytes_per_s=rate) > 0.3
        snapshot = await box.snapshot()
        # It is another device now; the files are still on the first one.
        assert await took_s(box, READ, read_bytes_per_s=rate) > 0.3
        assert await took_s(box, WRITE, write_bytes_per_s=rate) > 0.3
        await box.rollback(snapshot)
        assert await took_s(box, WRITE, write_bytes_per_s=rate) > 0.3

    in_box(pool, use)


def free_bytes(folder: Path) -> int:
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


@asynccontextmanager
async def small_host(folder: Path, num_bytes: int) -> AsyncIterator[tuple[Path, NativePool]]:
    """A pool whose disk has so much."""
    try:
        uppers = open_uppers(folder)
    except UserError as error:
        pytest.skip(str(error))
    mount = uppers.make(num_bytes, 10_000, (0, 0))
    directory = Path(f"/proc/self/fd/{mount}")
    try:
        pool = await asyncio.to_thread(disk_pool, directory)
        try:
            yield directory, pool
        finally:
            await pool.close()
    finally:
        os.close(mount)
        uppers.close()


def test_layers_that_are_dropped_free_the_disk(tmp_path: Path) -> None:
    async def main() -> None:
        async with small_host(tmp_path, 300 * MIB) as (host, pool), pool.acquire() as box:
            await sh(box, "true", disk_bytes=80 * MIB)
            empty = free_bytes(host)
            write = "head -c 40000000 /dev/urandom > f"
            assert (await sh(box, write, disk_bytes=80 * MIB)).status is ExecStatus.OK
            # What the box wrote was set aside before.
            assert empty - free_bytes(host) < 8 * MIB
            snapshot = await box.snapshot()
            await asyncio.to_thread(settle, pool)
            # A layer keeps what it uses and gives the rest back.
            assert 40_000_000 <= empty - free_bytes(host) < 60_000_000
            await box.rollback(await box.snapshot())
            async with box.fork(1, snapshot) as (child,):
                assert (await sh(child, "wc -c < f")).stdout == b"40000000\n"
            pool.forget(snapshot)
            assert (await sh(box, "wc -c < f", disk_bytes=80 * MIB)).stdout == b"40000000\n"
        async with small_host(tmp_path, 300 * MIB) as (host, pool):
            before = free_bytes(host)
            async with pool.acquire() as box:
                await sh(box, write, disk_bytes=80 * MIB)
                pool.forget(await box.snapshot())
            await asyncio.to_thread(wait_for_room, host, before - MIB)

    asyncio.run(main())


def test_a_full_host_refuses_boxes_and_takes_nothing_from_those_there_are(tmp_path: Path) -> None:
    async def main() -> None:
        async with small_host(tmp_path, 300 * MIB) as (host, pool), pool.acquire() as box:
            assert (await sh(box, "echo x > a", disk_bytes=100 * MIB)).status is ExecStatus.OK
            more = await sh(box, "true", disk_bytes=300 * MIB)
            assert more.status is ExecStatus.INFRA_ERROR
            assert "bytes left" in more.message
            # All that the host has left is taken by somebody else.
            fill_up(host / "other")
            with pytest.raises(ClassifiedFailure, match="bytes left"):
                async with pool.acquire():
                    pass
            write = "head -c 90000000 /dev/zero | tee f | md5sum; sync; md5sum < f; cat a"
            result = await sh(box, write, disk_bytes=100 * MIB)
            assert result.status is ExecStatus.OK, result
            first, second, last = result.stdout.splitlines()
            assert first == second
            assert last == b"x"
            (host / "other").unlink()
            await box.snapshot()
            assert (await sh(box, "cat a", disk_bytes=100 * MIB)).stdout == b"x\n"

    asyncio.run(main())


def test_a_disk_that_fails_is_an_infra_error_and_no_result(tmp_path: Path) -> None:
    async def main() -> None:
        pool = await asyncio.to_thread(disk_pool, tmp_path)
        async with pool.acquire() as box, pool.acquire() as other:
            await sh(box, "echo x > f")
            assert box._init is not None
            break_disk(os.fstat(box._init.upper_fd).st_dev)
            result = await sh(box, "cat f")
            assert result.status is ExecStatus.INFRA_ERROR
            assert "lost" in result.message
            assert (await sh(box, "cat f")).status is ExecStatus.INFRA_ERROR
            assert (await sh(other, "true")).status is ExecStatus.OK
        await pool.close()

    asyncio.run(main())


def test_what_was_lost_on_its_way_to_the_disk_is_no_snapshot(tmp_path: Path) -> None:
    async def main() -> None:
        async with small_host(tmp_path, 300 * MIB) as (host, pool), pool.acquire() as box:
            await sh(box, "head -c 1000000 /dev/urandom > f")
            folder = os.open(host, os.O_RDONLY | os.O_DIRECTORY)
            shut_down(folder)
            os.close(folder)
            with pytest.raises(ClassifiedFailure, match="lost"):
                await box.snapshot()
            assert (await sh(box, "cat f")).status is ExecStatus.INFRA_ERROR

    asyncio.run(main())


def fill_up(path: Path) -> None:
    with pytest.raises(OSError, match="No space"), path.open("wb", buffering=0) as file:  # noqa: PT012
        while True:
            file.write(bytes(MIB))


def settle(pool: NativePool) -> None:
    assert pool._stations.uppers is not None
    while pool._stations.uppers.is_busy:
        continue


def wait_for_room(host: Path, num_bytes: int) -> None:
    """Hangs, and so fails by the time limit of the run, if it is not freed."""
    while free_bytes(host) < num_bytes:
        continue


def break_disk(device: int) -> None:
    name = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}").resolve().name
    Path(f"/sys/fs/ext4/{name}/trigger_fs_error").write_text("by a test")


def shut_down(folder: int) -> None:
    """As a disk that was pulled out."""
    fcntl.ioctl(folder, 0x8004587D, struct.pack("<I", 2))


OWNER = """
import asyncio, sys
from pathlib import Path
from burnish.core.boxes import Limits
from burnish.sandbox.config import SandboxConfig
from burnish.sandbox.native.pool import NativePool

async def main():
    pool = NativePool(SandboxConfig(storage="disk", storage_directory=sys.argv[1]))
    async with pool.acquire() as box, pool.acquire() as other:
        await box.write_file("f", b"x")
        await box.snapshot()
        print(*pool.helper_pids, flush=True)
        busy = ("sh", "-c", "while :; do head -c 1000000 /dev/zero > f; done")
        await other.exec(busy, limits=Limits(wall_s=1000, cpu_s=1000))

asyncio.run(main())
"""


@pytest.mark.parametrize("victim", ["owner", "both"])
def test_a_killed_owner_leaves_no_device(tmp_path: Path, victim: str) -> None:
    asyncio.run(disk_pool(tmp_path).close())
    command = [sys.executable, "-c", OWNER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        helper = int(owner.stdout.readline())
        assert loops_over(tmp_path)
        if victim == "both":
            os.kill(helper, signal.SIGKILL)
        owner.kill()
    # The kernel unmounts while processes end; hangs, and so fails by the time limit, if not.
    while loops_over(tmp_path):
        continue
    assert list(tmp_path.iterdir()) == []
