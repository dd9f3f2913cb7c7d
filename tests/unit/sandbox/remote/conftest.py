"""A pool in memory whose commands end when the test says so, and a server over it."""

import contextlib
import io
import tarfile
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from burnish.core.boxes import (
    Capabilities,
    ExecResult,
    ExecStatus,
    Feature,
    Isolation,
    Limits,
    Policy,
    Snapshot,
    Usage,
)
from burnish.core.clock import ManualClock
from burnish.core.errors import ClassifiedFailure, FileTooLargeError, UserError
from burnish.core.records import Failure
from burnish.core.vocabulary import FailureKind
from burnish.sandbox.files import split_path
from burnish.sandbox.remote.client import RemotePool
from burnish.sandbox.remote.config import ServeConfig
from burnish.sandbox.remote.hosting import ServerThread

TOKEN = "a-token-of-more-than-16-characters"


def result(status: ExecStatus = ExecStatus.OK, stdout: bytes = b"") -> ExecResult:
    return ExecResult(
        status=status,
        exit_code=0 if status is ExecStatus.OK else None,
        signal=None,
        stdout=stdout,
        stderr=b"",
        truncated=False,
        usage=Usage(wall_s=0.1),
    )


class MemoryBox:
    """Files are a dict. `cat` gives its input; `wait` runs until `MemoryPool.go` is set."""

    def __init__(self, pool: "MemoryPool", files: dict[str, bytes]) -> None:
        self.id = f"memory-{pool.num_made}"
        self.files = dict(files)
        self._pool = pool

    async def write_file(self, path: str, data: bytes) -> None:
        split_path(path)
        if path == "full":
            raise OSError(28, "No space left on device")
        self.files[path] = data

    async def read_file(self, path: str, limit_bytes: int = 1 << 20) -> bytes:
        split_path(path)
        if path not in self.files:
            raise FileNotFoundError(2, "no regular file", path)
        if len(self.files[path]) > limit_bytes:
            raise FileTooLargeError.too_large(path, len(self.files[path]), limit_bytes)
        return self.files[path]

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
        pool = self._pool
        pool.num_started += 1
        if argv[0] == "bug":
            raise ZeroDivisionError("a bug of the backend")
        if argv[0] == "broken":
            failure = Failure(kind=FailureKind.INFRA, where="memory.exec", message="it broke")
            raise ClassifiedFailure(failure)
        if argv[0] == "mistake":
            raise UserError("wrong.", fix="do it right")
        if argv[0] == "wait":
            try:
                while not pool.go.is_set():
                    await pool.pause()
            except BaseException:
                pool.num_cancelled += 1
                raise
        return result(stdout=stdin + b"".join(map(str.encode, argv[1:])))

    async def snapshot(self) -> Snapshot:
        self._pool.num_snapshots += 1
        name = f"snap-{self._pool.num_snapshots}"
        self._pool.snapshots[name] = dict(self.files)
        return Snapshot(id=name, image="", num_layers=1)

    async def rollback(self, snapshot: Snapshot) -> None:
        self.files = dict(self._pool.snapshots[snapshot.id])

    async def forget(self, snapshot: Snapshot) -> None:
        self._pool.snapshots.pop(snapshot.id, None)

    @contextlib.asynccontextmanager
    async def fork(
        self, count: int, snapshot: Snapshot | None = None
    ) -> AsyncIterator[tuple["MemoryBox", ...]]:
        files = self.files if snapshot is None else self._pool.snapshots[snapshot.id]
        async with contextlib.AsyncExitStack() as stack:
            contexts = [self._pool.make(files) for _ in range(count)]
            yield tuple([await stack.enter_async_context(context) for context in contexts])

    async def export_tar(self, destination: Path, snapshot: Snapshot | None = None) -> str:
        files = self.files if snapshot is None else self._pool.snapshots[snapshot.id]
        with tarfile.open(destination, "w") as tar:
            for name, data in files.items():
                info = tarfile.TarInfo(name)
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
        return f"digest of {len(files)}"

    async def import_tar(self, source: Path) -> None:
        try:
            with tarfile.open(source) as tar:
                for info in tar:
                    file = tar.extractfile(info)
                    assert file is not None
                    self.files[info.name] = file.read()
        except tarfile.TarError as error:
            raise ValueError(f"no tar: {error}") from error


class MemoryPool:
    """At most `max_boxes` at once; more callers wait."""

    def __init__(self, max_boxes: int = 4, features: frozenset[Feature] | None = None) -> None:
        self.capabilities = Capabilities(
            backend="memory",
            enforces=frozenset(Limits.__struct_fields__),
            isolation=Isolation.NONE,
            features=frozenset(Feature) if features is None else features,
            seccomp=False,
        )
        self.max_boxes = max_boxes
        self.boxes: list[MemoryBox] = []
        self.snapshots: dict[str, dict[str, bytes]] = {}
        self.go = threading.Event()
        self.num_snapshots = 0
        self.num_made = self.num_started = self.num_cancelled = 0
        self.broken = False
        self.closed = False

    async def pause(self) -> None:
        """One turn of the loop, so that waiting costs no time and hides no event."""
        import asyncio

        await asyncio.sleep(0.001)

    def acquire(
        self, image: str | None = None, policy: Policy | None = None
    ) -> contextlib.AbstractAsyncContextManager[MemoryBox]:
        if image == "absent":
            raise UserError("there is no image absent.", fix="burnish sandbox image list")
        return self.make({})

    @contextlib.asynccontextmanager
    async def make(self, files: dict[str, bytes]) -> AsyncIterator[MemoryBox]:
        if self.broken:
            failure = Failure(kind=FailureKind.SANDBOX, where="memory", message="no box starts")
            raise ClassifiedFailure(failure)
        while len(self.boxes) >= self.max_boxes:
            await self.pause()
        self.num_made += 1
        box = MemoryBox(self, files)
        self.boxes.append(box)
        try:
            yield box
        finally:
            self.boxes.remove(box)

    async def close(self) -> None:
        self.closed = True


class Served:
    """A server over a `MemoryPool`, its clock, and its clients."""

    def __init__(self, folder: Path, max_boxes: int = 4, **config: object) -> None:
        self.pool = MemoryPool(max_boxes)
        self.clock = ManualClock()
        if "listen" in config:
            token = folder / "token"
            token.touch(0o600)
            token.write_text(TOKEN + "\n")
            config.setdefault("token_file", token)
        else:
            config["socket"] = folder / "socket"
        made = ServeConfig.model_validate(config)
        self.server = ServerThread(self.pool, made, max_boxes=max_boxes, clock=self.clock)
        self.url = self.server.url

    def pass_time(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.server.tend()


@pytest.fixture
def memory_pool() -> type[MemoryPool]:
    return MemoryPool


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Served]]:
    """Makes servers; keywords are those of `ServeConfig`."""
    made: list[Served] = []

    def make(max_boxes: int = 4, **config: object) -> Served:
        folder = tmp_path / str(len(made))
        folder.mkdir()
        made.append(Served(folder, max_boxes, **config))
        return made[-1]

    yield make
    for served in made:
        served.pool.go.set()
        served.server.close()
        assert served.pool.closed
        assert served.pool.boxes == []


@pytest.fixture
def served(serve: Callable[..., Served]) -> Served:
    return serve()


@pytest.fixture
def connect() -> Iterator[Callable[..., RemotePool]]:
    """Makes clients, and closes those that the test left open."""
    import asyncio

    made: list[RemotePool] = []

    def make(url: str, token: str | None = None, **options: object) -> RemotePool:
        made.append(RemotePool(url, token, **options))
        return made[-1]

    yield make
    for pool in made:
        asyncio.run(pool.close())
