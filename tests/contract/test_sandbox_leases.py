"""`sandbox.lease_s`: a box ends when its time is over, whatever is done with it.

What decides is that the command would go on for a minute, not how long anything took.
"""

import asyncio
from collections.abc import Callable, Iterator

import pytest

from burnish.core.boxes import ExecStatus, Limits, SandboxPool
from burnish.core.errors import ClassifiedFailure, UserError
from burnish.sandbox.bubblewrap.pool import BubblewrapPool
from burnish.sandbox.config import SandboxConfig
from burnish.sandbox.engine.pool import DockerPool
from burnish.sandbox.native.pool import NativePool
from burnish.sandbox.oci.pool import OciPool
from burnish.sandbox.start import open_pool

LEASE_S = 0.7
LONG = Limits(wall_s=60)
BACKENDS: dict[str, Callable[[SandboxConfig], SandboxPool]] = {
    "native": NativePool,
    "bubblewrap": BubblewrapPool,
    "crun": OciPool,
    "runc": lambda config: OciPool(config, "runc"),
    "gvisor": lambda config: OciPool(config, "runsc"),
    "podman": lambda config: OciPool(config, "podman"),
    "docker": DockerPool,
}
SLOW = frozenset({"runc", "gvisor", "podman", "docker"})


@pytest.fixture(
    params=[
        pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in BACKENDS
    ],
)
def pool(request: pytest.FixtureRequest) -> Iterator[SandboxPool]:
    try:
        made = BACKENDS[request.param](SandboxConfig(max_boxes=1, lease_s=LEASE_S))
    except UserError as error:
        pytest.skip(str(error))
    yield made
    asyncio.run(made.close())


def test_a_command_whose_box_ends_is_told_of_the_lease(pool: SandboxPool) -> None:
    async def main() -> None:
        async with pool.acquire() as box:
            result = await box.exec(("sleep", "60"), limits=LONG)
            assert result.status is ExecStatus.INFRA_ERROR, result
            assert "lease" in result.message
            assert f"{LEASE_S:g} s" in result.message
            again = await box.exec(("true",))
            assert (again.status, again.message) == (ExecStatus.INFRA_ERROR, result.message)
            for ask in (box.write_file("f", b""), box.read_file("f")):
                with pytest.raises(ClassifiedFailure, match="lease"):
                    await ask

    asyncio.run(main())


def test_what_ends_by_its_lease_leaves_its_place_to_others(pool: SandboxPool) -> None:
    async def main() -> None:
        async with pool.acquire() as held, pool.acquire() as next_one:
            # There is one place, and nobody has left it.
            assert held.id != next_one.id
            assert (await held.exec(("true",))).status is ExecStatus.INFRA_ERROR

    asyncio.run(main())


def test_a_box_that_is_given_back_in_time_leaves_no_lease(pool: SandboxPool) -> None:
    async def main() -> None:
        for _ in range(2):
            async with pool.acquire():
                pass
        others = asyncio.all_tasks() - {asyncio.current_task()}
        assert not others, others

    asyncio.run(main())


def test_hosts_are_not_told_how_long_to_lend_their_boxes() -> None:
    config = SandboxConfig(backend="remote", hosts=("http://127.0.0.1:1",), lease_s=1.0)
    with pytest.raises(UserError, match="lease_s"):
        open_pool(config)
