"""States with files that are closed to their owner or belong to other users of the box."""

import asyncio
import os
import tarfile
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, cast

import pytest

from burnish.core.boxes import (
    ExecStatus,
    Feature,
    Policy,
    Privileges,
    SandboxPool,
    StatefulSandbox,
)

Use = Callable[[StatefulSandbox, StatefulSandbox], Coroutine[Any, Any, None]]


def two_boxes(pool: SandboxPool, policy: Policy, use: Use) -> None:
    async def main() -> None:
        async with pool.acquire(None, policy) as one, pool.acquire(None, policy) as other:
            await use(cast(StatefulSandbox, one), cast(StatefulSandbox, other))

    wanted = {Feature.SNAPSHOTS}
    if policy.privileges is Privileges.PACKAGES:
        wanted.add(Feature.PRIVILEGES)
    if lacking := wanted - pool.capabilities.features:
        pytest.skip(f"the {pool.capabilities.backend} sandbox has no {sorted(lacking)} here")
    asyncio.run(main())


async def sh(box: StatefulSandbox, script: str) -> str:
    result = await box.exec(("sh", "-c", script))
    assert result.status is ExecStatus.OK, result
    return result.stdout.decode()


def files(archive: Path) -> dict[str, tuple[int, int, int]]:
    """Owner, group and mode of regular files, whiteouts aside."""
    with tarfile.open(archive) as tar:
        members = [m for m in tar.getmembers() if m.isfile() and "/.wh." not in m.name]
    return {m.name: (m.uid, m.gid, m.mode) for m in members}


def test_files_that_a_box_closed_are_in_its_states(pool: SandboxPool, tmp_path: Path) -> None:
    async def use(box: StatefulSandbox, other: StatefulSandbox) -> None:
        await sh(box, "mkdir d; echo x > d/f; chmod 0 d/f; chmod 0 d; echo y > g; chmod 0 g")
        await box.export_tar(tmp_path / "closed.tar")
        await other.import_tar(tmp_path / "closed.tar")
        assert await sh(other, "stat -c %a d g; chmod 700 d; chmod 600 d/f g; cat d/f g") == (
            "0\n0\nx\ny\n"
        )
        for number in range(16):
            await sh(box, f"echo {number} > n; chmod 0 n")
            await box.snapshot()
        await sh(box, "rm -f n")
        await box.export_tar(tmp_path / "merged.tar")
        assert files(tmp_path / "merged.tar") == files(tmp_path / "closed.tar")

    two_boxes(pool, Policy(), use)


def test_folders_of_a_box_are_as_they_were_after_an_import(
    pool: SandboxPool, tmp_path: Path
) -> None:
    if os.geteuid() != 0:
        pytest.skip("an ordinary user cannot look into a box (docs/sandbox.md)")
    for name in ("implied", "named"):
        with tarfile.open(tmp_path / f"{name}.tar", "w") as tar:
            for path in ("work", "tmp") if name == "named" else ("work/d/f", "tmp/f", "work/new/f"):
                info = tarfile.TarInfo(path)
                info.mode = 0o700
                info.type = tarfile.DIRTYPE if name == "named" else tarfile.REGTYPE
                tar.addfile(info)

    async def use(box: StatefulSandbox, other: StatefulSandbox) -> None:
        look = "stat -c '%n %u %g %a' /work /work/d /tmp"
        before = await sh(box, f"mkdir -m 751 d; {look}")
        assert "/tmp 0 0 1777" in before
        for name in ("implied", "named"):
            await box.import_tar(tmp_path / f"{name}.tar")
            assert await sh(box, look) == before, name
        assert await sh(box, "stat -c '%n %a' new; touch mine /tmp/mine") == "new 755\n"

    two_boxes(pool, Policy(), use)


def test_owners_of_the_box_are_in_its_states(pool: SandboxPool, tmp_path: Path) -> None:
    async def use(box: StatefulSandbox, other: StatefulSandbox) -> None:
        await sh(box, "echo r > root; echo u > user; chown 1234:4321 user; chmod 0 user root")
        await box.export_tar(tmp_path / "owners.tar")
        assert files(tmp_path / "owners.tar") == {
            "work/root": (0, 0, 0),
            "work/user": (1234, 4321, 0),
        }
        await other.import_tar(tmp_path / "owners.tar")
        assert await sh(other, "stat -c '%n %u %g' root user") == "root 0 0\nuser 1234 4321\n"
        for number in range(16):
            await sh(box, f"echo {number} > n; chown {number + 1} n")
            await box.snapshot()
        assert await sh(box, "stat -c %u n user; rm n") == "16\n1234\n"
        await box.export_tar(tmp_path / "merged.tar")
        assert files(tmp_path / "merged.tar") == files(tmp_path / "owners.tar")

    two_boxes(pool, Policy(privileges=Privileges.PACKAGES), use)
