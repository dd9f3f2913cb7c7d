"""Owners killed with -9 at random moments, while boxes are made too, leave nothing."""

import asyncio
import os
import shutil
from pathlib import Path

import pytest
from killed_owners import kill_owners

from burnish.core.errors import UserError
from burnish.sandbox.config import SandboxConfig
from burnish.sandbox.native.pool import NativePool


def loop_devices(folder: Path) -> list[str]:
    files = Path("/sys/block").glob("loop*/loop/backing_file")
    return [name for name in (path.read_text() for path in files) if name.startswith(f"{folder}/")]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["c", "python", "c-disk"])
def test_an_owner_killed_at_any_moment_leaves_nothing(kind: str, tmp_path: Path) -> None:
    helper, _, storage = kind.partition("-")
    config = SandboxConfig.model_validate(
        {"max_boxes": 12, "warm_boxes": 1, "helper": helper, "storage": storage or "memory"}
        | {"storage_directory": tmp_path}
    )
    if os.getuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("needs root and unshare (util-linux): a pid namespace of its own")
    try:
        pool = NativePool(config)
    except UserError as error:
        pytest.skip(str(error))
    asyncio.run(pool.close())
    num_rounds = 120 if kind == "c" else 40
    said = kill_owners(config, num_rounds, tmp_path)
    # Else nothing was killed that could have left something.
    assert min(said["seen"]["early"], said["seen"]["box"]) >= num_rounds // 6, said
    assert said["groups"] == []
    assert loop_devices(tmp_path) == []
    # The sweep looks for the socket of a daemon in a directory that it makes.
    assert [path for path in tmp_path.rglob("*") if path != tmp_path / "burnish"] == []
