"""Boxes of `Feature.PROCESSES`: kept processes and files are one state."""

import asyncio
import os
import select
import signal
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from burnish.core.boxes import ExecStatus, Feature, Limits, ProcessSandbox
from burnish.core.errors import ClassifiedFailure, UserError
from burnish.sandbox.config import SandboxConfig
from burnish.sandbox.oci.pool import OciPool
from burnish.sandbox.proctree import read_processes
from burnish.sandbox.session.criu import criu_probe

# It adds up what it is told, in memory only.
ADDER = """
import os
if os.fork():
    os._exit(0)
os.setsid()
total = 0
while True:
    with open("/work/in") as file:
        total += int(file.read())
    with open("/work/out", "w") as file:
        file.write(f"{total}")
"""
RIGHTS = ("Seccomp:", "NoNewPrivs:", "CapEff:", "CapBnd:", "Uid:", "Gid:")


@pytest.fixture(scope="module")
def pool() -> Iterator[OciPool]:
    found = criu_probe()
    if not found.usable:
        pytest.skip(f"{found.detail}: {found.fix}")
    try:
        made = OciPool(SandboxConfig(max_boxes=4), "runc")
    except UserError as error:
        pytest.skip(str(error))
    if Feature.PROCESSES not in made.capabilities.features:
        notes = made.capabilities.notes
        asyncio.run(made.close())
        pytest.skip("; ".join(notes))
    yield made
    asyncio.run(made.close())


async def start(box: ProcessSandbox, code: str = ADDER) -> None:
    await box.write_file("server.py", code.encode())
    command = "mkfifo in out; python3 server.py"
    result = await box.exec(("sh", "-c", command), keep=True)
    assert result.status is ExecStatus.OK, result


async def tell(box: ProcessSandbox, word: str) -> str:
    command = f"echo {word} >in; cat out"
    result = await box.exec(("sh", "-c", command), keep=True, limits=Limits(wall_s=30))
    assert result.status is ExecStatus.OK, result
    return result.stdout.decode()


def in_box(pool: OciPool, test: Callable[[ProcessSandbox], Awaitable[None]]) -> None:
    async def main() -> None:
        async with pool.acquire() as box:
            await test(box)  # type: ignore[arg-type]

    asyncio.run(main())


def keeper(pool: OciPool) -> int:
    """The keeper proper, in whose namespaces the boxes are."""
    (found,) = [p.pid for p in read_processes() if p.parent == pool.keeper_pid]
    return found


def kept_pids(root: int) -> set[int]:
    """All that lives below a process."""
    processes = [p for p in read_processes() if not p.dead]
    below, new = set(), {root}
    while new:
        below |= new
        new = {p.pid for p in processes if p.parent in new} - below
    return below - {root}


def footprint(pool: OciPool) -> tuple[int, int, int, int]:
    """Processes, open files and mounts of the keeper, control groups."""
    below = kept_pids(keeper(pool))
    groups = [
        folder for folder, _, _ in os.walk("/sys/fs/cgroup") if f"-{pool.keeper_pid}-" in folder
    ]
    root = keeper(pool)
    mounts = Path(f"/proc/{root}/mountinfo").read_text().splitlines()
    return len(below), len(os.listdir(f"/proc/{root}/fd")), len(mounts), len(groups)


def states(pool: OciPool) -> list[Path]:
    """What was saved, as we can reach it."""
    (place,) = Path(f"/proc/{keeper(pool)}/root").glob("*/states")
    return sorted(path for path in place.iterdir() if path.is_dir())


def test_memory_and_files_come_back_together(pool: OciPool) -> None:
    async def test(box: ProcessSandbox) -> None:
        await start(box)
        assert await tell(box, "5") == "5"
        snapshot = await box.snapshot()
        assert await tell(box, "7") == "12"
        await box.write_file("later", b"x")
        for _ in range(2):
            await box.rollback(snapshot)
            assert await tell(box, "1") == "6"
        with pytest.raises(FileNotFoundError):
            await box.read_file("later")
        await box.forget(snapshot)
        with pytest.raises(UserError, match="no such snapshot"):
            await box.rollback(snapshot)
        assert await tell(box, "1") == "7"

    in_box(pool, test)


def test_forks_go_on_from_the_same_memory_each_by_itself(pool: OciPool) -> None:
    async def test(box: ProcessSandbox) -> None:
        await start(box)
        await tell(box, "5")
        async with box.fork(2) as (one, two):
            assert await tell(one, "10") == "15"
            assert await tell(two, "20") == "25"
            assert await tell(box, "30") == "35"
            assert await tell(one, "1") == "16"

    in_box(pool, test)
    assert states(pool) == []


def test_restored_processes_have_no_more_rights_and_the_limits_of_their_box(pool: OciPool) -> None:
    code = ADDER.replace("total += int(file.read())", "file.read()").replace(
        "total}", "open('/proc/self/status').read()}{open('/proc/self/cgroup').read()}"
    )

    def rights(text: str) -> list[str]:
        # The group that runc makes for itself has the number of the container in its name.
        kept = [s for s in text.splitlines() if s.startswith(RIGHTS) or "box-" in s]
        return [s for s in kept if "-run-" not in s]

    async def test(box: ProcessSandbox) -> None:
        await start(box, code)
        before = rights(await tell(box, "status"))
        assert "Seccomp:\t2" in before
        assert len(before) > len(RIGHTS)
        snapshot = await box.snapshot()
        assert rights(await tell(box, "status")) == before
        await box.rollback(snapshot)
        assert rights(await tell(box, "status")) == before
        async with box.fork(1, snapshot) as (fork,):
            other = rights(await tell(fork, "status"))
            assert other[: len(RIGHTS)] == before[: len(RIGHTS)]
            assert not set(other[len(RIGHTS) :]) & set(before[len(RIGHTS) :])
        await box.forget(snapshot)

    in_box(pool, test)


@pytest.mark.parametrize("name", ["img/pages-1.img", "img/core-1.img", "inbox/script"])
def test_a_damaged_state_is_refused_and_the_box_stays_as_it_was(pool: OciPool, name: str) -> None:
    async def test(box: ProcessSandbox) -> None:
        await start(box)
        await tell(box, "5")
        snapshot = await box.snapshot()
        await tell(box, "7")
        await box.write_file("later", b"x")
        (state,) = states(pool)
        path = state / "run-0" / name
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
        with pytest.raises(ClassifiedFailure, match=f"damaged: {name}"):
            await box.rollback(snapshot)
        assert await tell(box, "1") == "13"
        assert await box.read_file("later") == b"x"
        await box.forget(snapshot)

    in_box(pool, test)


def test_files_that_do_not_match_the_processes_give_neither(pool: OciPool) -> None:
    """CRIU itself fails: the server's file, which it has open, is gone from the copy."""

    async def test(box: ProcessSandbox) -> None:
        await start(box, "kept = open('/work/server.py')\n" + ADDER)
        await tell(box, "5")
        snapshot = await box.snapshot()
        await tell(box, "7")
        (state,) = states(pool)
        (state / "files" / "work" / "server.py").unlink()
        with pytest.raises(ClassifiedFailure, match=r"could not be restored: .*server\.py"):
            await box.rollback(snapshot)
        assert await tell(box, "1") == "13"
        assert await box.read_file("server.py")
        await box.forget(snapshot)

    in_box(pool, test)


def test_a_process_that_cannot_be_saved_is_told_and_lives_on(pool: OciPool) -> None:
    connected = (
        "import socket\nserver = socket.create_server(('127.0.0.1', 0))\n"
        "client = socket.create_connection(server.getsockname())\npeer, _ = server.accept()\n"
    )

    async def test(box: ProcessSandbox) -> None:
        await start(box)
        await tell(box, "5")
        await box.write_file("connected.py", (connected + ADDER.replace("/in", "/in2")).encode())
        argv = ("sh", "-c", "mkfifo in2; python3 connected.py")
        await box.exec(argv, keep=True)
        with pytest.raises(UserError, match=r"(?i)cannot be saved: .*socket"):
            await box.snapshot()
        # Both: the one that was saved before the other failed, too.
        assert await tell(box, "1") == "6"
        assert (await box.exec(("sh", "-c", "echo 3 >in2; cat out"), keep=True)).stdout == b"3"

    in_box(pool, test)
    assert states(pool) == []


def test_a_command_without_keep_ends_what_was_restored(pool: OciPool) -> None:
    async def test(box: ProcessSandbox) -> None:
        await start(box)
        snapshot = await box.snapshot()
        await box.rollback(snapshot)
        await box.exec(("true",))
        alone = "timeout 0.2 sh -c 'echo 1 >in'; echo $?"
        assert (await box.exec(("sh", "-c", alone))).stdout == b"124\n"
        await box.rollback(snapshot)
        assert await tell(box, "4") == "4"
        await box.forget(snapshot)

    in_box(pool, test)


@pytest.mark.slow
def test_boxes_that_are_saved_at_once_do_not_disturb_each_other(pool: OciPool) -> None:
    async def one(number: int) -> None:
        async with pool.acquire() as made:
            box: ProcessSandbox = made  # type: ignore[assignment]
            await start(box)
            for turn in range(1, 3):
                snapshot = await box.snapshot()
                assert await tell(box, f"{number}") == f"{number * turn}"
                await box.rollback(snapshot)
                assert await tell(box, f"{number}") == f"{number * turn}"
                await box.forget(snapshot)

    async def other() -> None:
        for _ in range(10):
            async with pool.acquire() as box:
                result = await box.exec(("sh", "-c", "sleep 0.05 & exit 0"))
                assert result.status is ExecStatus.OK, result

    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            for number in (1, 2, 3):
                group.create_task(one(number))
            group.create_task(other())

    asyncio.run(main())


def test_a_box_that_ends_while_it_is_saved_takes_all_along(pool: OciPool) -> None:
    async def test(box: ProcessSandbox) -> None:
        await start(box)
        saving = asyncio.create_task(box.snapshot())
        await box.read_file("server.py")  # by then the keeper has the other request, too
        saving.cancel()
        await asyncio.wait((saving,))

    before = footprint(pool)
    in_box(pool, test)
    in_box(pool, start)  # type: ignore[arg-type]
    assert footprint(pool) == before
    assert states(pool) == []


def test_all_output_of_a_kept_command_arrives_and_nothing_that_came_after(pool: OciPool) -> None:
    limits = Limits(stdout_bytes=300_000)

    async def test(box: ProcessSandbox) -> None:
        for size in (0, 1, 299_999, 300_000):
            code = f"head -c {size} /dev/zero; head -c {size} /dev/zero >&2; sleep 9 & exit 3"
            result = await box.exec(("sh", "-c", code), keep=True, limits=limits)
            assert (result.status, result.exit_code) == (ExecStatus.EXIT, 3), result
            assert result.stdout == result.stderr == bytes(size)
            assert not result.truncated
        code = "head -c 300001 /dev/zero; sleep 9 &"
        result = await box.exec(("sh", "-c", code), keep=True, limits=limits)
        assert result.status is ExecStatus.OUTPUT
        assert len(result.stdout) == 300_000

    in_box(pool, test)


def test_snapshots_of_another_pool_are_refused(pool: OciPool) -> None:
    async def test(box: ProcessSandbox) -> None:
        snapshot = await box.snapshot()
        other = type(snapshot)(id="1-1", image="", num_layers=1)
        with pytest.raises(UserError, match="no snapshot 1-1"):
            await box.rollback(other)
        await box.forget(snapshot)

    in_box(pool, test)


def test_nothing_is_left_of_many_states(pool: OciPool) -> None:
    async def test(box: ProcessSandbox) -> None:
        await start(box)
        snapshot = await box.snapshot()
        await box.rollback(snapshot)
        async with box.fork(1, snapshot):
            pass
        await box.forget(snapshot)

    in_box(pool, test)
    before = footprint(pool)
    for _ in range(2):
        in_box(pool, test)
    assert footprint(pool) == before
    assert states(pool) == []


def test_a_killed_keeper_leaves_no_kept_process_and_the_next_start_no_group(
    pool: OciPool,
) -> None:
    doomed = OciPool(SandboxConfig(max_boxes=1), "runc")

    async def test(box: ProcessSandbox) -> None:
        await start(box)
        await box.rollback(await box.snapshot())
        inside = keeper(doomed)
        watched = [os.pidfd_open(pid) for pid in (inside, *kept_pids(inside))]
        assert len(watched) > 2
        os.kill(doomed.keeper_pid, signal.SIGKILL)
        for descriptor in watched:
            assert select.select([descriptor], [], [], 30)[0], "it lives on"
            os.close(descriptor)

    killed = doomed.keeper_pid
    in_box(doomed, test)
    asyncio.run(doomed.close())
    asyncio.run(OciPool(SandboxConfig(max_boxes=1), "runc").close())
    groups = [folder for folder, _, _ in os.walk("/sys/fs/cgroup") if f"-{killed}-" in folder]
    assert groups == []


def test_without_criu_what_needs_it_is_a_users_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    try:
        pool = OciPool(SandboxConfig(max_boxes=1), "runc")
    except UserError as error:
        pytest.skip(str(error))

    async def test(box: ProcessSandbox) -> None:
        with pytest.raises(UserError, match="CRIU 4"):
            await box.exec(("true",), keep=True)
        with pytest.raises(UserError, match="CRIU 4"):
            await box.snapshot()

    try:
        assert not pool.capabilities.features & {Feature.PROCESSES, Feature.BACKGROUND}
        assert any("no criu" in note for note in pool.capabilities.notes)
        in_box(pool, test)
    finally:
        asyncio.run(pool.close())
