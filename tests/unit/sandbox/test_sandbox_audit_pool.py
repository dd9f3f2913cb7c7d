import asyncio
import hashlib
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import cast

import pytest

from burnish.core.boxes import (
    Capabilities,
    ExecResult,
    ExecStatus,
    Feature,
    Isolation,
    Limits,
    Policy,
    Sandbox,
    Snapshot,
    StatefulSandbox,
    Usage,
)
from burnish.core.clock import ManualClock
from burnish.core.errors import ClassifiedFailure, UserError
from burnish.sandbox.audit import AuditedPool, AuditLogs, Report, read, verify_all
from burnish.sandbox.audit.events import AnyEvent, Ended, Failed, Started
from burnish.sandbox.audit.log import AuditFailure, Sync
from burnish.sandbox.config import SandboxConfig
from burnish.sandbox.network.events import NetworkEvent, Reason, Verdict


class FakeBox:
    """A box that answers at once; `exec(("raise",))` raises and `("hang",)` never ends."""

    def __init__(self, name: str) -> None:
        self.id = name
        self.files: dict[str, bytes] = {}
        self.commands: list[tuple[str, ...]] = []

    async def write_file(self, path: str, data: bytes) -> None:
        if path.startswith("/"):
            raise ValueError("path must be relative")
        self.files[path] = data

    async def read_file(self, path: str, limit_bytes: int = 1 << 20) -> bytes:
        if path not in self.files:
            raise FileNotFoundError(path)
        return self.files[path][:limit_bytes]

    async def exec(
        self,
        argv: tuple[str, ...],
        *,
        stdin: bytes = b"",
        limits: Limits | None = None,
        env: dict[str, str] | None = None,
        cwd: str = "/work",
        keep: bool = False,
    ) -> ExecResult:
        self.commands.append(argv)
        if argv == ("raise",):
            raise UserError("no such limit.", fix="leave it out")
        if argv == ("hang",):
            await asyncio.Event().wait()
        await asyncio.sleep(0)
        status = ExecStatus.OOM if argv == ("oom",) else ExecStatus.OK
        return ExecResult(
            status=status,
            exit_code=0,
            signal=None,
            stdout=b"out" + stdin,
            stderr=b"\xff\n{}",
            truncated=argv == ("cut",),
            usage=Usage(wall_s=0.25, cpu_s=None),
            message="line\nbreak",
        )

    async def snapshot(self) -> Snapshot:
        return Snapshot(id=f"{self.id}-snap", image="", num_layers=1)

    async def rollback(self, snapshot: Snapshot) -> None:
        if snapshot.id == "foreign":
            raise ValueError("a snapshot of another pool")

    @asynccontextmanager
    async def fork(
        self, count: int, snapshot: Snapshot | None = None
    ) -> AsyncIterator[tuple[StatefulSandbox, ...]]:
        yield tuple(FakeBox(f"{self.id}.{number}") for number in range(count))

    async def export_tar(self, destination: Path, snapshot: Snapshot | None = None) -> str:
        return "tar-digest"

    async def import_tar(self, source: Path) -> None:
        pass


class FakePool:
    def __init__(self, *, stateful: bool = True, names: Iterator[str] | None = None) -> None:
        features = frozenset({Feature.SNAPSHOTS}) if stateful else frozenset()
        self.capabilities = Capabilities(
            backend="fake",
            enforces=frozenset(),
            isolation=Isolation.NONE,
            features=features,
            seccomp=False,
        )
        self.names = names or (f"box {number}" for number in range(1 << 20))
        self.live: list[FakeBox] = []
        self.closed = False
        self._lock = threading.Lock()

    @asynccontextmanager
    async def acquire(
        self, image: str | None = None, policy: Policy | None = None
    ) -> AsyncIterator[Sandbox]:
        with self._lock:
            box = FakeBox(next(self.names))
            self.live.append(box)
        try:
            yield box
        finally:
            self.live.remove(box)

    async def close(self) -> None:
        self.closed = True


Body = Callable[[StatefulSandbox], Awaitable[None]]


def use(pool: FakePool, logs: AuditLogs | Path, body: Body, image: str | None = None) -> None:
    async def main() -> None:
        async with AuditedPool(pool, logs).acquire(image) as box:
            await body(box)  # type: ignore[arg-type]

    asyncio.run(main())


def only_report(directory: Path) -> Report:
    (report,) = verify_all(directory)
    assert report.ok
    return report


def events_of(directory: Path) -> list[AnyEvent]:
    return [line.event for line in read(Path(only_report(directory).path))]


def kinds(events: list[AnyEvent]) -> list[str]:
    return [str(event.__struct_config__.tag) for event in events]


def test_every_operation_is_written_down_in_order(tmp_path: Path) -> None:
    archive = tmp_path / "archive.tar"
    archive.write_bytes(b"tar")

    async def body(box: StatefulSandbox) -> None:
        await box.write_file("a", b"x")
        await box.read_file("a")
        await box.exec(("true",))
        snapshot = await box.snapshot()
        await box.rollback(snapshot)
        await box.export_tar(archive)
        await box.import_tar(archive)

    use(FakePool(), tmp_path / "logs", body)
    events = events_of(tmp_path / "logs")
    assert " ".join(kinds(events)) == (
        "create put get exec result snapshot rollback export import destroy"
    )
    assert only_report(tmp_path / "logs").ended
    assert only_report(tmp_path / "logs").anchored


def test_a_command_is_described_without_the_values_of_its_variables(tmp_path: Path) -> None:
    async def body(box: StatefulSandbox) -> None:
        limits = Limits(wall_s=3.0)
        await box.exec(("oom",), stdin=b"in", env={"KEY": "hunter2"}, cwd="/tmp", limits=limits)
        await box.exec(("cut",), keep=True)

    use(FakePool(), tmp_path, body)
    _, started, ended, _, cut, _ = events_of(tmp_path)
    assert isinstance(started, Started)
    assert isinstance(ended, Ended)
    assert isinstance(cut, Ended)
    assert (started.argv, started.cwd, started.keep) == (("oom",), "/tmp", False)
    assert started.limits.wall_s == 3.0
    assert started.stdin_digest == hashlib.sha256(b"in").hexdigest()
    assert (ended.of, ended.status, ended.limit_hit) == (1, ExecStatus.OOM, "oom")
    assert ended.stdout_digest == hashlib.sha256(b"outin").hexdigest()
    assert ended.message == "line\nbreak"
    assert cut.limit_hit == "output"
    assert b"hunter2" not in Path(only_report(tmp_path).path).read_bytes()


def test_the_first_line_says_what_the_box_was_made_from(tmp_path: Path) -> None:
    logs = AuditLogs(tmp_path, image_digest={"debian": "abc"}.get)

    async def body(box: StatefulSandbox) -> None:
        pass

    use(FakePool(), logs, body, image="debian")
    created = events_of(tmp_path)[0]
    assert kinds([created]) == ["create"]
    assert (created.backend, created.image_digest) == ("fake", "abc")  # type: ignore[union-attr]


def test_an_operation_that_raises_is_written_down_and_raises(tmp_path: Path) -> None:
    async def body(box: StatefulSandbox) -> None:
        with pytest.raises(UserError):
            await box.exec(("raise",))
        with pytest.raises(ValueError, match="relative"):
            await box.write_file("/etc/passwd", b"")
        with pytest.raises(FileNotFoundError):
            await box.read_file("absent")
        with pytest.raises(ValueError, match="another pool"):
            await box.rollback(Snapshot(id="foreign", image="", num_layers=0))

    use(FakePool(), tmp_path, body)
    failed = [event for event in events_of(tmp_path) if isinstance(event, Failed)]
    assert [(event.operation, event.of) for event in failed] == [
        ("exec", 1),
        ("put", 3),
        ("get", None),
        ("rollback", 6),
    ]


def test_a_command_whose_caller_gave_up_is_written_down(tmp_path: Path) -> None:
    async def body(box: StatefulSandbox) -> None:
        task = asyncio.create_task(box.exec(("hang",)))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    use(FakePool(), tmp_path, body)
    failed = events_of(tmp_path)[2]
    assert isinstance(failed, Failed)
    assert "CancelledError" in failed.error


def test_forks_continue_the_chain_of_their_parent(tmp_path: Path) -> None:
    async def body(box: StatefulSandbox) -> None:
        snapshot = await box.snapshot()
        async with box.fork(3, snapshot) as forks:
            await asyncio.gather(*[fork.exec(("true",)) for fork in forks])
            async with forks[0].fork(2) as grandchildren:
                await grandchildren[0].exec(("true",))

    use(FakePool(), tmp_path, body)
    reports = verify_all(tmp_path)
    assert len(reports) == 6
    assert all(report.ok and report.ended and report.anchored for report in reports)
    parent = next(report for report in reports if report.box == "box 0")
    lines = Path(parent.path).read_bytes().splitlines()
    hashes = [hashlib.sha256(line).hexdigest() for line in lines]
    child = next(report for report in reports if report.box == "box 0.1")
    first = next(read(Path(child.path)))
    assert first.prev == hashes[2]


def remove_logs(directory: Path) -> None:
    for path in directory.glob("*/*.jsonl"):
        path.unlink()


def test_without_a_log_no_command_runs(tmp_path: Path) -> None:
    pool = FakePool()

    async def body(box: StatefulSandbox) -> None:
        remove_logs(tmp_path)
        result = await box.exec(("true",))
        assert result.status is ExecStatus.INFRA_ERROR
        assert "cannot be written" in result.message
        with pytest.raises(AuditFailure):
            await box.write_file("a", b"")
        assert pool.live[0].commands == []
        assert pool.live[0].files == {}

    with pytest.raises(ClassifiedFailure, match="cannot be written"):
        use(pool, tmp_path, body)
    assert pool.live == []


@pytest.mark.parametrize("raised", [KeyError("mine"), asyncio.CancelledError()])
def test_a_log_without_an_end_hides_no_other_exception(
    tmp_path: Path, raised: BaseException
) -> None:
    async def body(box: StatefulSandbox) -> None:
        async with box.fork(2):
            remove_logs(tmp_path)
            raise raised

    with pytest.raises(type(raised)) as caught:
        use(FakePool(), tmp_path, body)
    assert len(caught.value.__notes__) == 3
    assert "the audit log has no end" in caught.value.__notes__[0]


def test_a_log_that_cannot_begin_costs_the_box(tmp_path: Path) -> None:
    pool = FakePool()
    logs = AuditLogs(tmp_path, clock=ManualClock())
    (tmp_path / "1970-01-01").write_text("in the way")

    async def body(box: StatefulSandbox) -> None:
        pytest.fail("there is no box without a log")

    with pytest.raises(AuditFailure):
        use(pool, logs, body)
    assert pool.live == []


def test_heads_that_cannot_be_written_are_no_silent_loss(tmp_path: Path) -> None:
    heads = tmp_path / "absent" / "heads.jsonl"

    async def body(box: StatefulSandbox) -> None:
        pytest.fail("there is no box whose log nobody could check")

    with pytest.raises(AuditFailure):
        use(FakePool(), AuditLogs(tmp_path / "logs", heads=heads), body)


@pytest.mark.parametrize(
    "name", ["../../../etc/cron.d/x", "a/b", "", ".", "\0", "x" * 5000, "\udc80\n", "heads"]
)
def test_the_id_of_a_box_cannot_choose_a_file(tmp_path: Path, name: str) -> None:
    async def body(box: StatefulSandbox) -> None:
        assert box.id == name

    logs = tmp_path / "logs"
    use(FakePool(names=iter([name])), logs, body)
    report = only_report(logs)
    assert report.box == name
    assert Path(report.path).parent.parent == logs
    assert [path.name for path in tmp_path.iterdir()] == ["logs"]


def test_boxes_of_one_name_and_second_have_logs_of_their_own(tmp_path: Path) -> None:
    logs = AuditLogs(tmp_path, clock=ManualClock())

    async def body(box: StatefulSandbox) -> None:
        pass

    for _ in range(3):
        use(FakePool(names=iter(["same"])), logs, body)
    assert len(verify_all(tmp_path)) == 3


def test_many_boxes_from_several_event_loops_leave_good_logs(tmp_path: Path) -> None:
    audited = AuditedPool(FakePool(), tmp_path)

    async def one() -> None:
        async with audited.acquire() as box:
            await asyncio.gather(*[box.exec(("true",), stdin=bytes([n])) for n in range(20)])

    async def several() -> None:
        await asyncio.gather(*[one() for _ in range(10)])

    threads = [threading.Thread(target=lambda: asyncio.run(several())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    reports = verify_all(tmp_path)
    assert len(reports) == 40
    assert all(report.ok and report.anchored and report.num_lines == 42 for report in reports)


def test_lines_can_be_forced_to_the_disk_one_by_one(tmp_path: Path) -> None:
    async def body(box: StatefulSandbox) -> None:
        await box.exec(("true",))

    use(FakePool(), AuditLogs(tmp_path, sync=Sync.EACH), body)
    assert only_report(tmp_path).num_lines == 4


def decision(box: str) -> NetworkEvent:
    return NetworkEvent(
        time=1.0,
        box=box,
        host="evil.example",
        port=443,
        address="",
        verdict=Verdict.DENIED,
        reason=Reason.NOT_LISTED,
    )


def test_decisions_of_the_proxy_are_in_the_log_of_their_box(tmp_path: Path) -> None:
    logs = AuditLogs(tmp_path)

    async def body(box: StatefulSandbox) -> None:
        thread = threading.Thread(target=logs.network, args=(decision(box.id),))
        thread.start()
        thread.join()

    use(FakePool(), logs, body)
    assert kinds(events_of(tmp_path)) == ["create", "network", "destroy"]


def test_a_decision_about_an_unknown_box_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AuditFailure, match="no log of a box"):
        AuditLogs(tmp_path).network(decision("nobody"))


def test_backends_without_state_give_plain_boxes(tmp_path: Path) -> None:
    async def body(box: StatefulSandbox) -> None:
        assert not hasattr(box, "snapshot")
        await box.exec(("true",))

    use(FakePool(stateful=False), tmp_path, body)
    assert only_report(tmp_path).ended


def test_closing_closes_the_pool_inside(tmp_path: Path) -> None:
    pool = FakePool()
    asyncio.run(AuditedPool(pool, tmp_path).close())
    assert pool.closed


def test_a_directory_that_cannot_be_made_is_a_users_mistake(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="audit logs cannot be written"):
        AuditLogs(tmp_path / "file" / "logs")


def test_a_native_box_is_described_with_its_layers(tmp_path: Path) -> None:
    native = pytest.importorskip("burnish.sandbox.native.pool")
    try:
        pool = native.NativePool(SandboxConfig(max_boxes=3))
    except UserError as error:
        pytest.skip(str(error))
    audited = AuditedPool(pool, tmp_path)

    async def main() -> None:
        async with audited.acquire() as acquired:
            box = cast(StatefulSandbox, acquired)
            await box.exec(("touch", "a"))
            snapshot = await box.snapshot()
            await box.exec(("sh", "-c", "kill -9 $$"))
            async with box.fork(1, snapshot) as (fork,):
                assert (await fork.exec(("ls",))).stdout == b"a\n"
            await box.rollback(snapshot)
        await audited.close()

    asyncio.run(main())
    parent, child = sorted(verify_all(tmp_path), key=lambda report: -report.num_lines)
    assert parent.ok
    assert child.ok
    assert parent.anchored
    assert child.anchored
    before, after = (event for event in events_in(Path(parent.path)) if isinstance(event, Started))
    (forked,) = (event for event in events_in(Path(child.path)) if isinstance(event, Started))
    assert before.layers == ()
    assert len(after.layers) == 1
    assert forked.layers == after.layers
    (_, killed) = (event for event in events_in(Path(parent.path)) if isinstance(event, Ended))
    assert (killed.status, killed.signal) == (ExecStatus.SIGNAL, 9)


def events_in(path: Path) -> list[AnyEvent]:
    return [line.event for line in read(path)]
