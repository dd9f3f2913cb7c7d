"""What every backend with `Feature.SNAPSHOTS` must do with the files of a box."""

import asyncio
import io
import tarfile
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, cast

import pytest

from burnish.core.boxes import (
    ExecStatus,
    Feature,
    Limits,
    SandboxPool,
    Snapshot,
    StatefulSandbox,
)
from burnish.core.errors import ClassifiedFailure, UserError
from burnish.sandbox.interpreter import python_argv

Use = Callable[[StatefulSandbox], Coroutine[Any, Any, Any]]


@pytest.fixture
def stateful(pool: SandboxPool) -> SandboxPool:
    if Feature.SNAPSHOTS not in pool.capabilities.features:
        pytest.skip(f"the {pool.capabilities.backend} sandbox has no snapshots")
    return pool


def in_box(pool: SandboxPool, use: Use) -> Any:
    async def main() -> Any:
        async with pool.acquire() as box:
            return await use(cast(StatefulSandbox, box))

    return asyncio.run(main())


async def sh(box: StatefulSandbox, script: str, **limits: Any) -> str:
    result = await box.exec(("sh", "-c", script), limits=Limits(**limits))
    assert result.status is ExecStatus.OK, result
    return result.stdout.decode()


LIST = "find /work /tmp -mindepth 1 | sort; cat /work/* 2>/dev/null; true"


def test_rollback_brings_back_what_was_changed_deleted_and_added(stateful: SandboxPool) -> None:
    async def use(box: StatefulSandbox) -> None:
        await sh(box, "echo one > a; echo two > b; mkdir d; echo x > d/x; ln -s a l; touch /tmp/t")
        before = await sh(box, LIST)
        snapshot = await box.snapshot()
        assert await sh(box, LIST) == before
        await sh(box, "echo changed > a; rm -r b d /tmp/t; echo new > c; mkdir d; echo y > d/y")
        assert await sh(box, LIST) != before
        await box.rollback(snapshot)
        assert await sh(box, LIST) == before
        assert await sh(box, "cat d/x; readlink l") == "x\na\n"

    in_box(stateful, use)


def test_a_snapshot_can_be_used_again_and_again_and_in_any_order(stateful: SandboxPool) -> None:
    async def use(box: StatefulSandbox) -> None:
        snapshots: list[Snapshot] = []
        for number in range(5):
            await sh(box, f"echo {number} > n; touch f{number}")
            snapshots.append(await box.snapshot())
        for number in (3, 0, 4, 0, 2):
            await box.rollback(snapshots[number])
            assert await sh(box, "cat n; ls | wc -l") == f"{number}\n{number + 2}\n"
            await sh(box, "echo dirty > n; rm -f f0")

    in_box(stateful, use)


def test_processes_end_with_a_snapshot_and_a_rollback(stateful: SandboxPool) -> None:
    async def use(box: StatefulSandbox) -> None:
        count = "set -- /proc/[0-9]*; echo $#"
        alone = await sh(box, count)
        keeping = Feature.BACKGROUND in stateful.capabilities.features
        await box.exec(("sh", "-c", "sleep 1000 & echo x > f"), keep=keeping)
        snapshot = await box.snapshot()
        assert await sh(box, count) == alone
        await box.exec(("sh", "-c", "sleep 1000 &"), keep=keeping)
        await box.rollback(snapshot)
        assert await sh(box, count) == alone

    in_box(stateful, use)


def test_nothing_changed_is_the_same_snapshot(stateful: SandboxPool) -> None:
    async def use(box: StatefulSandbox) -> None:
        empty = await box.snapshot()
        assert await box.snapshot() == empty
        await sh(box, "echo x > f")
        first = await box.snapshot()
        assert first != empty
        await sh(box, "cat f; ls /")
        assert await box.snapshot() == first
        assert first.num_layers == empty.num_layers + 1

    in_box(stateful, use)


def test_a_forgotten_snapshot_is_gone_and_boxes_keep_their_files(stateful: SandboxPool) -> None:
    async def use(box: StatefulSandbox) -> None:
        await sh(box, "echo old > f")
        first = await box.snapshot()
        await sh(box, "echo new > g")
        second = await box.snapshot()
        async with box.fork(1, first) as (child,):
            await box.forget(first)
            await box.forget(first)
            with pytest.raises(UserError):
                await box.rollback(first)
            assert await sh(child, "cat f; ls") == "old\nf\n"
        await sh(box, "rm f g")
        await box.rollback(second)
        assert await sh(box, "cat f g") == "old\nnew\n"

    in_box(stateful, use)


def test_forks_start_alike_and_go_apart(stateful: SandboxPool) -> None:
    async def use(box: StatefulSandbox) -> None:
        await sh(box, "echo parent > f")
        async with box.fork(3) as children:
            assert len({child.id for child in (*children, box)}) == 4
            for number, child in enumerate(children):
                assert await sh(child, "cat f") == "parent\n"
                await sh(child, f"echo {number} > f; touch only-{number}")
            await sh(box, "echo changed > f")
            seen = [await sh(child, "cat f; ls | wc -l") for child in children]
            assert seen == ["0\n2\n", "1\n2\n", "2\n2\n"]
        assert await sh(box, "cat f; ls") == "changed\nf\n"
        gone = await children[0].exec(("true",))
        assert gone.status is ExecStatus.INFRA_ERROR

    in_box(stateful, use)


def test_a_fork_of_an_older_snapshot_does_not_see_the_present(stateful: SandboxPool) -> None:
    async def use(box: StatefulSandbox) -> None:
        await sh(box, "echo old > f")
        snapshot = await box.snapshot()
        await sh(box, "echo new > f")
        async with box.fork(1, snapshot) as (child,):
            assert await sh(child, "cat f") == "old\n"
            async with child.fork(1) as (grandchild,):
                assert await sh(grandchild, "cat f") == "old\n"
        assert await sh(box, "cat f") == "new\n"

    in_box(stateful, use)


def test_a_long_chain_of_snapshots_keeps_every_state(stateful: SandboxPool) -> None:
    """Longer than the file system can stack: layers are merged on the way."""

    async def use(box: StatefulSandbox) -> None:
        snapshots = []
        for number in range(40):
            await sh(box, f"echo {number} > n; touch f{number}; rm -f f{number - 3}")
            snapshots.append(await box.snapshot())
        for number in (39, 20, 1, 38):
            await box.rollback(snapshots[number])
            files = sorted(f"f{n}" for n in range(max(0, number - 2), number + 1))
            assert (await sh(box, "cat n; ls f*")).split() == [str(number), *files]

    in_box(stateful, use)


def test_a_share_of_a_processor_holds_after_a_snapshot(stateful: SandboxPool) -> None:
    if "cpus" not in stateful.capabilities.enforces:
        pytest.skip(f"the {stateful.capabilities.backend} sandbox does not enforce cpus here")
    code = """
import time
end = time.monotonic() + 1
while time.monotonic() < end: pass
"""

    async def use(box: StatefulSandbox) -> None:
        limits = Limits(cpus=0.2)
        await box.exec(("sh", "-c", "echo x > f"), limits=limits)
        await box.snapshot()
        result = await box.exec(python_argv("-c", code), limits=limits)
        assert result.usage.cpu_s is not None
        # A busy machine makes it less; what is added is for periods that are cut.
        assert result.usage.cpu_s < 0.2 * result.usage.wall_s + 0.25

    in_box(stateful, use)


def test_an_export_has_one_digest_and_can_be_imported(
    stateful: SandboxPool, tmp_path: Path
) -> None:
    async def use(box: StatefulSandbox) -> None:
        await sh(box, "mkdir -p d/e; echo x > d/e/x; ln -s x d/e/l; chmod 750 d; echo 1 > '\x01 '")
        first = await box.export_tar(tmp_path / "one.tar")
        assert await box.export_tar(tmp_path / "two.tar") == first
        assert (tmp_path / "one.tar").read_bytes() == (tmp_path / "two.tar").read_bytes()
        async with stateful.acquire() as other:
            copy = cast(StatefulSandbox, other)
            await copy.import_tar(tmp_path / "one.tar")
            assert await sh(copy, "cat d/e/l; stat -c %a d; ls") == await sh(
                box, "cat d/e/l; stat -c %a d; ls"
            )
            await copy.write_file("more", b"x")
            assert await copy.export_tar(tmp_path / "three.tar") != first

    in_box(stateful, use)


def hostile_tar(path: Path, member: tarfile.TarInfo, data: bytes = b"") -> Path:
    with tarfile.open(path, "w") as archive:
        member.size = len(data)
        archive.addfile(member, io.BytesIO(data))
    return path


def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, link
    info.devmajor, info.devminor = 1, 1
    return info


HOSTILE = {
    "climbs": member("../../escaped"),
    "device": member("work/memory", tarfile.CHRTYPE),
    "block device": member("work/disk", tarfile.BLKTYPE),
    "pipe": member("work/pipe", tarfile.FIFOTYPE),
    "hard link out": member("work/shadow", tarfile.LNKTYPE, "../../../etc/shadow"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_archive_is_refused_and_changes_nothing(
    stateful: SandboxPool, tmp_path: Path, name: str
) -> None:
    archive = hostile_tar(tmp_path / "hostile.tar", HOSTILE[name])

    async def use(box: StatefulSandbox) -> None:
        await sh(box, "echo kept > f")
        with pytest.raises((ValueError, OSError)):
            await box.import_tar(archive)
        assert await sh(box, "cat f; ls") == "kept\nf\n"

    in_box(stateful, use)
    assert not (tmp_path.parent / "escaped").exists()


def test_an_archive_that_is_none_is_refused(stateful: SandboxPool, tmp_path: Path) -> None:
    (tmp_path / "no.tar").write_bytes(b"\xff" * 5000)

    async def use(box: StatefulSandbox) -> None:
        with pytest.raises(ValueError, match=r"no\.tar"):
            await box.import_tar(tmp_path / "no.tar")
        assert await sh(box, "ls") == ""

    in_box(stateful, use)


def test_links_left_in_a_box_do_not_lead_an_import_out(
    stateful: SandboxPool, tmp_path: Path
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    with tarfile.open(tmp_path / "t.tar", "w") as archive:
        archive.addfile(member("work/d", tarfile.SYMTYPE, str(outside)))
        inner = member("work/d/f")
        archive.addfile(inner)

    async def use(box: StatefulSandbox) -> None:
        try:
            await box.import_tar(tmp_path / "t.tar")
        except (ValueError, OSError):
            return

    in_box(stateful, use)
    assert list(outside.iterdir()) == []


def test_a_snapshot_of_another_pool_is_refused(
    stateful: SandboxPool, backend: Callable[[int], SandboxPool]
) -> None:
    other = backend(1)

    async def use(box: StatefulSandbox) -> Snapshot:
        await sh(box, "echo x > f")
        return await box.snapshot()

    foreign = in_box(other, use)
    asyncio.run(other.close())

    async def rollback(box: StatefulSandbox) -> None:
        with pytest.raises((UserError, ValueError, ClassifiedFailure)):
            await box.rollback(foreign)
        await sh(box, "true")

    in_box(stateful, rollback)


def test_the_disk_limit_is_the_boxs_own_after_a_fork(stateful: SandboxPool) -> None:
    async def use(box: StatefulSandbox) -> None:
        await sh(box, "head -c 1000000 /dev/zero > big")
        async with box.fork(2) as children:
            for child in children:
                code = "open('more','wb').write(bytes(8_000_000))"
                result = await child.exec(python_argv("-c", code), limits=Limits(disk_bytes=2**21))
                assert result.status is ExecStatus.DISK, result
                assert await sh(child, "wc -c < big") == "1000000\n"

    in_box(stateful, use)


def test_a_snapshot_waits_for_the_running_command(stateful: SandboxPool) -> None:
    async def use(box: StatefulSandbox) -> None:
        running = asyncio.create_task(box.exec(("sh", "-c", "sleep 0.3; echo done > f")))
        await asyncio.sleep(0.05)
        snapshot = await box.snapshot()
        assert (await running).status is ExecStatus.OK
        await sh(box, "rm f")
        await box.rollback(snapshot)
        assert await sh(box, "cat f") == "done\n"

    in_box(stateful, use)


def test_layers_that_snapshots_keep_are_not_charged_to_the_next_box(stateful: SandboxPool) -> None:
    async def keep(box: StatefulSandbox) -> Snapshot:
        await sh(box, "head -c 40000000 /dev/zero > big", memory_bytes=2**27)
        return await box.snapshot()

    async def use(box: StatefulSandbox) -> ExecStatus:
        code = "held = bytearray(20_000_000)\nfor i in range(0, len(held), 4096): held[i] = 1"
        return (await box.exec(python_argv("-c", code), limits=Limits(memory_bytes=2**25))).status

    for _ in range(4):
        in_box(stateful, keep)
        assert in_box(stateful, use) is ExecStatus.OK


def test_files_for_folders_of_this_host_are_refused_and_change_nothing(
    stateful: SandboxPool, tmp_path: Path
) -> None:
    with tarfile.open(tmp_path / "t.tar", "w") as archive:
        for name in ("work/new", "usr/local/lost"):
            info = member(name)
            info.size = 1
            archive.addfile(info, io.BytesIO(b"x"))

    async def use(box: StatefulSandbox) -> None:
        await sh(box, "echo kept > f")
        with pytest.raises(UserError, match=r"usr/local/lost.* would be hidden.* --image"):
            await box.import_tar(tmp_path / "t.tar")
        assert await sh(box, "cat f; ls") == "kept\nf\n"

    in_box(stateful, use)
