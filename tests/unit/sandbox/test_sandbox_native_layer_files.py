"""Layers of every kind of helper are written by owners of every kind."""

import asyncio
import os
import tarfile
from pathlib import Path

import pytest

from burnish.core.boxes import ExecStatus
from burnish.core.errors import UserError
from burnish.sandbox.config import SandboxConfig
from burnish.sandbox.native.layer_files import LayerFiles
from burnish.sandbox.native.pool import NativePool
from burnish.sandbox.native.stateful import NativeBox

STAT = ("sh", "-c", "stat -c '%a %u %n' f d && chmod 600 f && cat f n")


async def travels(box: NativeBox, other: NativeBox, archive: Path) -> None:
    await box.exec(("sh", "-c", "echo x > f; chmod 0 f; mkdir d; chmod 0 d"))
    for number in range(14):
        await box.exec(("sh", "-c", f"echo {number} > n"))
        await box.snapshot()
    await box.export_tar(archive)
    await other.import_tar(archive)
    shown = [await one.exec(STAT) for one in (box, other)]
    assert shown[0].status is ExecStatus.OK, shown[0]
    assert shown[0].stdout == shown[1].stdout
    assert shown[0].stdout.endswith(b"x\n13\n")


def test_states_of_warm_python_are_merged_exported_and_imported(tmp_path: Path) -> None:
    async def main() -> None:
        try:
            pool = NativePool(SandboxConfig(max_boxes=2, warm_boxes=0))
        except UserError as error:
            pytest.skip(str(error))
        try:
            async with pool.acquire_python(("json",)) as box, pool.acquire_python(("json",)) as two:
                await travels(box, two, tmp_path / "state.tar")
                answer = await two.python("import json; print(json.load(open('n')))")
                assert answer.stdout == b"13\n"
        finally:
            await pool.close()

    asyncio.run(main())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root works as somebody else: run as root")
def test_a_thread_is_its_old_self_afterwards(tmp_path: Path) -> None:
    def powers() -> list[str]:
        status = Path("/proc/thread-self/status").read_text(encoding="ascii")
        return [line for line in status.splitlines() if line.startswith(("Uid", "Gid", "Cap"))]

    before = powers()
    (tmp_path / "file").write_text("content")
    with tarfile.open(tmp_path / "good.tar", "w") as tar:
        tar.add(tmp_path / "file", "file")
    (tmp_path / "bad.tar").write_bytes(b"no archive" * 1000)
    (tmp_path / "layer").mkdir()
    into = os.open(tmp_path / "layer", os.O_RDONLY | os.O_DIRECTORY)
    # Owner and group need not be the same, and the archive is closed to both.
    files = LayerFiles(1_900_000_000, 1_900_000_007, os.getpid())
    (tmp_path / "good.tar").chmod(0)
    files.import_tar(tmp_path / "good.tar", into)
    assert powers() == before
    with pytest.raises(ValueError, match="not a tar"):
        files.import_tar(tmp_path / "bad.tar", into)
    assert powers() == before
    os.close(into)
    assert (tmp_path / "layer/file").stat().st_uid == 1_900_000_000
