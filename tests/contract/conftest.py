"""The backends that this machine can try. Every suite runs against all of its kind."""

import asyncio
import functools
import tempfile
import textwrap
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
from box_kinds import ImagePool, WarmPool
from engine_backends import BACKENDS as ENGINES
from engine_backends import REAL, Backend, VllmProcess, open_backend

from burnish.core.boxes import ExecResult, ExecStatus, Limits, SandboxPool
from burnish.core.errors import UserError
from burnish.sandbox.bubblewrap.pool import BubblewrapPool
from burnish.sandbox.config import SandboxConfig
from burnish.sandbox.engine.pool import DockerPool
from burnish.sandbox.interpreter import python_argv
from burnish.sandbox.native.pool import NativePool
from burnish.sandbox.oci.pool import OciPool
from burnish.sandbox.remote.client import RemotePool
from burnish.sandbox.remote.config import ServeConfig
from burnish.sandbox.remote.hosting import ServerThread
from burnish.sandbox.start import open_pool


class ServedPool(RemotePool):
    """Boxes of a server that ends with its one client."""

    def __init__(self, max_boxes: int) -> None:
        served = open_pool(SandboxConfig(max_boxes=max_boxes))
        self._folder = tempfile.TemporaryDirectory()
        config = ServeConfig(socket=Path(self._folder.name, "socket"))
        self._server = ServerThread(served, config, max_boxes=max_boxes)
        super().__init__(self._server.url)

    async def close(self) -> None:
        await super().close()
        self._server.close()
        self._folder.cleanup()


MakePool = Callable[[int], SandboxPool]
"""From the number of boxes that may live at once."""

# A new backend is one more entry here.
BACKENDS: dict[str, MakePool] = {
    "native": lambda n: NativePool(SandboxConfig(max_boxes=n)),
    "native-sampled": lambda n: NativePool(SandboxConfig(max_boxes=n, control_groups=False)),
    "native-python": lambda n: NativePool(SandboxConfig(max_boxes=n, helper="python")),
    "native-disk": lambda n: NativePool(SandboxConfig(max_boxes=n, storage="disk")),
    "bubblewrap": lambda n: BubblewrapPool(SandboxConfig(max_boxes=n)),
    "bubblewrap-sampled": lambda n: BubblewrapPool(
        SandboxConfig(max_boxes=n, control_groups=False)
    ),
}
BACKENDS["remote"] = ServedPool
BACKENDS |= {
    "oci-crun": lambda n: OciPool(SandboxConfig(max_boxes=n), "crun"),
    "oci-crun-sampled": lambda n: OciPool(SandboxConfig(max_boxes=n, control_groups=False), "crun"),
    "oci-runc": lambda n: OciPool(SandboxConfig(max_boxes=n), "runc"),
    "gvisor": lambda n: OciPool(SandboxConfig(max_boxes=n), "runsc"),
    "podman": lambda n: OciPool(SandboxConfig(max_boxes=n), "podman"),
    "docker": lambda n: DockerPool(SandboxConfig(max_boxes=n)),
    "podman-sampled": lambda n: OciPool(SandboxConfig(max_boxes=n, control_groups=False), "podman"),
}
# Their single tests are so slow that only `make test-slow` runs them.
SLOW = frozenset({"oci-crun-sampled", "oci-runc", "gvisor", "podman", "podman-sampled", "docker"})


# Other ways to a native box, for hostile code only.
KINDS: dict[str, MakePool] = {"native-warm": WarmPool, "native-image": ImagePool}
SLOW |= frozenset(KINDS)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "backend" in metafunc.fixturenames:
        names = [*BACKENDS, *(KINDS if "_escape" in metafunc.module.__name__ else ())]
        marked = [pytest.param(n, marks=[pytest.mark.slow] if n in SLOW else []) for n in names]
        metafunc.parametrize("backend", marked, indirect=True, scope="module")


@pytest.fixture(scope="module")
def backend(request: pytest.FixtureRequest) -> MakePool:
    return {**BACKENDS, **KINDS}[request.param]


@pytest.fixture
def owns_root(pool: SandboxPool) -> bool:
    """Whether programs may change what lies below `/usr`: it is their box's copy of an image."""
    return isinstance(pool, ImagePool)


@pytest.fixture(scope="module")
def pool(backend: MakePool) -> Iterator[SandboxPool]:
    try:
        made = backend(4)
    except UserError as error:
        pytest.skip(str(error))
    yield made
    asyncio.run(made.close())


PRELUDE = """
import ctypes, errno, os, socket, sys
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *arguments):
    ctypes.set_errno(0)
    padded = [ctypes.c_ulong(a & (2**64 - 1)) for a in arguments] + [ctypes.c_ulong(0)] * 6
    result = libc.syscall(ctypes.c_long(number), *padded[:6])
    return errno.errorcode.get(ctypes.get_errno(), "ok") if result == -1 else "ok"
def attempt(action):
    try:
        return repr(action())
    except OSError as error:
        return errno.errorcode[error.errno]
"""
"""What hostile programs in the suites start with."""


AttackIn = Callable[..., ExecResult]


@pytest.fixture
def attack_in() -> AttackIn:
    """Runs Python code in a box of its own of a pool; keywords are limits."""

    def run(pool: SandboxPool, code: str, **limits: int) -> ExecResult:
        async def main() -> ExecResult:
            async with pool.acquire() as box:
                await box.write_file("attack.py", (PRELUDE + textwrap.dedent(code)).encode())
                return await box.exec(python_argv("attack.py"), limits=Limits(**limits))

        return asyncio.run(main())

    return run


@pytest.fixture
def attack(pool: SandboxPool, attack_in: AttackIn) -> Callable[..., ExecResult]:
    """Runs Python code in a box of its own; keywords are limits."""
    return functools.partial(attack_in, pool)


@pytest.fixture
def lines(attack: Callable[..., ExecResult]) -> Callable[[str], list[str]]:
    """Runs Python code that must end well; returns what it printed."""

    def run(code: str) -> list[str]:
        result = attack(code)
        assert result.status is ExecStatus.OK, result
        return result.stdout.decode().splitlines()

    return run


@pytest.fixture
def prelude() -> str:
    """Definitions of `call` and `attempt` for programs that run in two boxes at once."""
    return PRELUDE


ENGINE_DEADLINE_S = 120.0


@pytest.fixture(scope="session")
def real_servers() -> Iterator[Callable[[str], VllmProcess]]:
    """Started when the first test asks for one, shared by all."""
    started: dict[str, VllmProcess] = {}

    def get(name: str) -> VllmProcess:
        if name not in started:
            started[name] = VllmProcess(*REAL[name])
        return started[name]

    yield get
    for process in started.values():
        process.close()


@pytest.fixture(params=ENGINES)
def play(
    request: pytest.FixtureRequest, real_servers: Callable[[str], VllmProcess]
) -> Callable[[Callable[[Backend], Awaitable[None]]], None]:
    """Runs a scenario against each engine, which serves `state(0)` as version 4."""

    def runner(scenario: Callable[[Backend], Awaitable[None]]) -> None:
        real = real_servers(request.param) if request.param in REAL else None

        async def main() -> None:
            backend = open_backend(request.param, real)
            try:
                async with asyncio.timeout(ENGINE_DEADLINE_S):
                    await backend.prepare()
                    await scenario(backend)
            finally:
                await backend.close()

        asyncio.run(main())

    return runner
