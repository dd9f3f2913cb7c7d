import asyncio
import contextlib
import os
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hypothesis import settings
from xdist.scheduler import LoadScopeScheduling

from burnish.core.boxes import (
    Capabilities,
    ExecResult,
    ExecStatus,
    Isolation,
    Limits,
    Policy,
    Usage,
)

# The suite's verdict is the same for the same code; `make fuzz` looks for what it does not draw.
# No deadlines: how long a draw takes says more of the machine than of the code.
settings.register_profile("same", derandomize=True, deadline=None)
settings.register_profile("fuzz", derandomize=False, deadline=None, print_blob=True)
settings.load_profile("same")

# What is shown to people fits their terminal; that of who runs the tests is not part of a test.
os.environ.pop("COLUMNS", None)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> LoadScopeScheduling:
    """Files are shared out whole; those about boxes, which fill the machine, are one share."""
    return _Shares(config, log)


class _Shares(LoadScopeScheduling):
    def _split_scope(self, nodeid: str) -> str:
        path = nodeid.split("::")[0]
        about_boxes = path.startswith(("tests/contract/test_sandbox", "tests/unit/sandbox/"))
        return "boxes" if about_boxes else path


class PlainBox:
    """A process in a temporary directory: for tests of what stands on boxes, not for isolation."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.id = folder.name

    async def write_file(self, path: str, data: bytes) -> None:
        (self._folder / path).write_bytes(data)

    async def read_file(self, path: str, limit_bytes: int = 1 << 20) -> bytes:
        return (self._folder / path).read_bytes()[:limit_bytes]

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
        limits = limits or Limits()
        # The shell bounds CPU seconds, so that endless loops end on a loaded machine too.
        process = await asyncio.create_subprocess_exec(
            *("sh", "-c", 'ulimit -t "$0" && exec "$@"', str(int(limits.cpu_s) or 1), *argv),
            cwd=self._folder,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            process.stdin.write(stdin)
            await process.stdin.drain()
            process.stdin.close()
        out = b""
        while len(out) <= limits.stdout_bytes and (chunk := await process.stdout.read(65536)):
            out += chunk
        if len(out) > limits.stdout_bytes:
            process.kill()
        code = await process.wait()
        status = ExecStatus.OK if code == 0 else ExecStatus.EXIT if code > 0 else ExecStatus.SIGNAL
        truncated = len(out) > limits.stdout_bytes
        return ExecResult(
            status=ExecStatus.OUTPUT if truncated else status,
            exit_code=code if code >= 0 else None,
            signal=-code if code < 0 else None,
            stdout=out[: limits.stdout_bytes],
            stderr=b"",
            truncated=truncated,
            usage=Usage(wall_s=0.0),
        )


class PlainPool:
    """Fresh directories."""

    def __init__(self) -> None:
        self.num_acquired = 0
        self.num_live = 0

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            backend="plain",
            enforces=frozenset({"cpu_s", "stdout_bytes"}),
            isolation=Isolation.NONE,
            seccomp=False,
        )

    @contextlib.asynccontextmanager
    async def acquire(
        self, image: str | None = None, policy: Policy | None = None
    ) -> AsyncIterator[PlainBox]:
        with tempfile.TemporaryDirectory() as folder:
            self.num_acquired += 1
            self.num_live += 1
            try:
                yield PlainBox(Path(folder))
            finally:
                self.num_live -= 1

    async def close(self) -> None:
        pass


@pytest.fixture
def plain_pool() -> PlainPool:
    """A pool without isolation that works everywhere; run only the tests' own code in it."""
    return PlainPool()
