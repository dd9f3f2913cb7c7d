"""Boxes that cannot begin, and what a snapshot leaves out."""

import asyncio
import contextlib
import os
import select
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from burnish.core.boxes import ExecStatus, Policy
from burnish.core.errors import ClassifiedFailure, UserError
from burnish.sandbox.config import SandboxConfig
from burnish.sandbox.native.pool import NativePool
from burnish.sandbox.native.wire import program_files

NO_PROCESSOR = 1000
ALONE = Policy(deterministic=True)


@pytest.fixture(params=["c", "python"])
def pool(request: pytest.FixtureRequest) -> Iterator[NativePool]:
    try:
        made = NativePool(SandboxConfig(max_boxes=2, warm_boxes=0, helper=request.param))
    except UserError as error:
        pytest.skip(str(error))
    yield made
    asyncio.run(made.close())


def num_boxes(pool: NativePool) -> int:
    """Descriptors of file systems that the helper of the host holds."""
    folder, found = f"/proc/{pool.helper_pids[0]}/fd", 0
    for name in os.listdir(folder):
        # It makes a box ahead meanwhile, and closes what that took.
        with contextlib.suppress(FileNotFoundError):
            found += os.readlink(f"{folder}/{name}") == "/"
    return found


async def works(pool: NativePool) -> None:
    async with pool.acquire() as box:
        assert (await box.exec(("true",))).status is ExecStatus.OK


def test_a_box_that_does_not_begin_is_an_error_of_whoever_waits_for_it(pool: NativePool) -> None:
    station = pool._stations.host
    processors, station._processors = station._processors, [NO_PROCESSOR]
    station.proven = False

    async def main() -> None:
        await works(pool)
        station.proven = False
        before = num_boxes(pool)
        for _ in range(3):
            with pytest.raises(ClassifiedFailure, match="could not be made"):
                async with pool.acquire(policy=ALONE):
                    raise AssertionError
        station._processors = processors
        await works(pool)
        assert num_boxes(pool) <= before + 1  # the one that was made ahead
        assert pool._places.num_taken == 0

    asyncio.run(main())


def test_where_boxes_have_begun_the_first_command_tells(pool: NativePool) -> None:
    station = pool._stations.host
    station._processors = [NO_PROCESSOR]

    async def main() -> None:
        await works(pool)
        async with pool.acquire(policy=ALONE) as box:
            result = await box.exec(("true",))
            assert result.status is ExecStatus.INFRA_ERROR
            assert "did not start" in result.message
        await works(pool)

    asyncio.run(main())


def test_a_snapshot_does_not_keep_shared_memory(pool: NativePool) -> None:
    async def main() -> None:
        station = pool._stations.host
        async with pool.acquire() as box:
            await box.exec(("sh", "-c", "echo x > kept; seq 1000 | split -l 1 -a 3 - /dev/shm/x"))
            await box.snapshot()
            (layer,) = station.stack(box._hold)
            folder = await station.layer_fd(layer)
            try:
                assert os.listdir(os.open("../s", os.O_RDONLY, dir_fd=folder)) == []
            finally:
                os.close(folder)
            result = await box.exec(("sh", "-c", "cat kept; ls /dev/shm"))
            assert result.stdout == b"x\n"

    asyncio.run(main())


def test_programs_are_looked_for_where_the_path_of_the_job_says() -> None:
    assert program_files("tool", "/a::/b") == ("/a/tool", "tool", "/b/tool")
    assert program_files("./tool", "/a") == ("./tool",)
    assert program_files("", "/a") == ("",)
    assert program_files("tool", None) == ("/usr/local/bin/tool", "/usr/bin/tool", "/bin/tool")
    assert program_files("tool", "/" + "x" * 5000 + ":/a") == ("/a/tool",)


def test_a_box_is_made_up_for_after_its_user_has_the_first_result(pool: NativePool) -> None:
    order = []

    async def main() -> None:
        async with pool.acquire() as box:
            box.on_first = lambda: order.append("made up for")
            for _ in range(2):
                await box.exec(("true",))
                order.append("result")
                await asyncio.sleep(0)

    asyncio.run(main())
    assert order == ["result", "made up for", "result"]


def test_a_box_that_has_ended_lives_again_in_the_state_to_which_it_goes_back(
    pool: NativePool,
) -> None:
    async def main() -> None:
        async with pool.acquire() as box:
            await box.exec(("sh", "-c", "echo before > f"))
            snapshot = await box.snapshot()
            await box.exec(("sh", "-c", "echo after > f"))
            assert box._init is not None
            box._init.kill()
            for _ in range(2):
                assert (await box.exec(("cat", "f"))).status is ExecStatus.INFRA_ERROR
            await box.rollback(snapshot)
            assert (await box.exec(("cat", "f"))).stdout == b"before\n"
            async with box.fork(1) as (copy,):
                assert (await copy.exec(("cat", "f"))).stdout == b"before\n"
        with pytest.raises(ClassifiedFailure, match="destroyed"):
            await box.rollback(snapshot)

    asyncio.run(main())


def test_a_box_that_had_ended_before_it_was_destroyed_does_not_live_again(
    pool: NativePool,
) -> None:
    async def main() -> None:
        async with pool.acquire() as box:
            snapshot = await box.snapshot()
            await box.exec(("true",))
            assert box._init is not None
            box._init.kill()
            assert (await box.exec(("true",))).status is ExecStatus.INFRA_ERROR
        with pytest.raises(ClassifiedFailure, match="destroyed"):
            await box.rollback(snapshot)

    asyncio.run(main())


def test_an_import_into_a_box_that_has_ended_says_so(pool: NativePool, tmp_path: Path) -> None:
    tarfile.open(tmp_path / "a.tar", "w").close()

    async def main() -> None:
        async with pool.acquire() as box:
            snapshot = await box.snapshot()
            await box.exec(("true",))
            assert box._init is not None
            process = os.pidfd_open(box._init.pid)
            box._init.kill()
            select.select((process,), (), ())
            os.close(process)
            with pytest.raises(ClassifiedFailure, match="the box has ended"):
                await box.import_tar(tmp_path / "a.tar")
            await box.rollback(snapshot)
            await box.import_tar(tmp_path / "a.tar")

    asyncio.run(main())
