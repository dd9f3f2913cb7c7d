"""A machine without a C compiler gets the same package and boxes, and is told what it lacks."""

import asyncio
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from burnish.core.boxes import ExecStatus
from burnish.core.errors import UserError
from burnish.sandbox.config import SandboxConfig
from burnish.sandbox.interpreter import python_argv
from burnish.sandbox.native import binary
from burnish.sandbox.native.launch import helper_command
from burnish.sandbox.native.pool import NativePool
from burnish.sandbox.probe import _helper_check
from burnish.sandbox.start import open_pool

ROOT = Path(__file__).parents[3]
SOURCES = ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE", "src")
BUILT = shutil.ignore_patterns("_zygote", "_kernels*.so", "__pycache__", "*.egg-info")
HATCHLING = (sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", "dist")
# What an installation answers in which nothing was compiled.
TRY = """
import asyncio, json, sys
from burnish.core.boxes import ExecStatus
from burnish.sandbox.config import SandboxConfig
from burnish.sandbox.probe import _helper_check
from burnish.sandbox.start import open_pool
import burnish

async def main():
    pool = open_pool(SandboxConfig(max_boxes=1))
    async with pool.acquire() as box:
        status = (await box.exec(("true",))).status
    backend = pool.capabilities.backend
    await pool.close()
    return {"backend": backend, "status": status}

said = asyncio.run(main())
said["file"] = burnish.__file__
said["doctor"] = _helper_check().detail
print(json.dumps(said))
"""


def test_without_the_compiled_helper_auto_runs_boxes_by_the_one_in_python(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(binary, "BINARY", tmp_path / "absent")
    try:
        pool = open_pool(SandboxConfig(max_boxes=1))
    except UserError as error:
        pytest.skip(str(error))
    if not isinstance(pool, NativePool):
        asyncio.run(pool.close())
        pytest.skip("native boxes do not run here: see burnish doctor")

    async def main() -> ExecStatus:
        async with pool.acquire() as box:
            return (await box.exec(python_argv("-c", "print(1)"))).status

    assert asyncio.run(main()) is ExecStatus.OK
    asyncio.run(pool.close())
    assert "--zygote" not in helper_command("auto")
    helper = _helper_check()
    assert not helper.ok
    assert "in Python" in helper.detail
    assert "it was not built" in helper.detail
    assert "gcc" in helper.fix


def without_tools(folder: Path) -> dict[str, str]:
    """A PATH with a Python and no compiler."""
    programs = folder / "bin"
    programs.mkdir()
    (programs / "python3").symlink_to(sys.executable)
    return {"PATH": str(programs), "CC": ""}


@pytest.mark.slow
@pytest.mark.parametrize("what", ["no compiler in PATH", "a compiler that fails"])
def test_the_package_installs_without_a_compiler_and_its_boxes_run(
    what: str, tmp_path: Path
) -> None:
    pytest.importorskip("hatchling", reason="needs the build backend: make install-dev")
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in SOURCES:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, copy / name, ignore=BUILT)
        else:
            shutil.copy(source, copy / name)
    environment = {
        "no compiler in PATH": without_tools(tmp_path),
        "a compiler that fails": {"CC": "false"},
    }[what]
    built = subprocess.run(
        HATCHLING,
        cwd=copy,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    assert "No native sandbox helper, Python will do its work" in built.stdout + built.stderr
    (wheel,) = (copy / "dist").iterdir()
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert not [n for n in archive.namelist() if n.endswith(("/_zygote", "/_kernels.so"))]
        archive.extractall(tmp_path / "site")
    paths = [str(tmp_path / "site"), *(path for path in sys.path if path.endswith("-packages"))]
    tried = subprocess.run(
        [sys.executable, "-c", TRY],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        check=False,
    )
    if "no sandbox runs here" in tried.stderr:
        pytest.skip("no sandbox runs here: see burnish doctor")
    assert tried.returncode == 0, tried.stderr
    said = json.loads(tried.stdout)
    assert said["file"].startswith(str(tmp_path / "site"))
    assert said["status"] == ExecStatus.OK
    assert said["backend"] == "native"
    assert "in Python, boxes start slower: it was not built" in said["doctor"]
