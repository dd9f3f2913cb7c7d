"""A real system from the package mirror that this machine is set up for, and a box of it."""

import asyncio
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from burnish.core.boxes import ExecResult, ExecStatus
from burnish.core.errors import UserError
from burnish.sandbox.config import SandboxConfig
from burnish.sandbox.images.store import ImageStore
from burnish.sandbox.native.pool import NativePool

_APT_HELPER = "/usr/lib/apt/apt-helper"
_ANSWER_S = 20


def own_mirror() -> tuple[str, str]:
    """Suite and mirror of this machine's apt, if it answers."""
    if shutil.which("apt-get") is None or not os.access(_APT_HELPER, os.X_OK):
        pytest.skip("no apt here, to say where packages come from")
    release = Path("/etc/os-release").read_text(encoding="utf-8").splitlines()
    suite = dict(line.split("=", 1) for line in release if "=" in line).get("VERSION_CODENAME", "")
    form = "$(CODENAME) $(COMPONENT) $(SITE)"
    ask = ["apt-get", "indextargets", "--format", form, "Created-By: Packages"]
    listed = subprocess.run(ask, capture_output=True, text=True, check=False).stdout
    found = [words[2] for words in map(str.split, listed.splitlines()) if words[:1] == [suite]]
    if not found:
        pytest.skip(f"apt has no mirror of {suite or 'this system'} here")
    with tempfile.TemporaryDirectory() as folder:
        url = f"{found[0].rstrip('/')}/dists/{suite}/InRelease"
        fetch = [_APT_HELPER, "download-file", url, f"{folder}/InRelease"]
        fetch += ["-o", f"Acquire::http::Timeout={_ANSWER_S}", "-o", "Acquire::Retries=0"]
        if subprocess.run(fetch, capture_output=True, check=False).returncode:
            pytest.skip("the mirror that apt is set up for does not answer")
    return suite, found[0]


@pytest.mark.slow
def test_a_suite_from_a_mirror_becomes_an_image_whose_boxes_run(tmp_path: Path) -> None:
    if shutil.which("mmdebstrap") is None and (os.getuid() != 0 or not shutil.which("debootstrap")):
        pytest.skip("needs mmdebstrap, or as root debootstrap: sudo apt-get install mmdebstrap")
    suite, mirror = own_mirror()
    tmp_path.chmod(0o755)
    store = ImageStore(tmp_path / "images")
    image = store.add_debootstrap("system", suite, mirror=mirror)
    assert store.verify("system")
    try:
        pool = NativePool(SandboxConfig(max_boxes=1), images=store)
    except UserError as error:
        pytest.skip(str(error))

    async def main() -> ExecResult:
        async with pool.acquire("system") as box:
            script = ". /etc/os-release; echo $VERSION_CODENAME; dpkg -s libc6 | grep ^Status"
            return await box.exec(("sh", "-c", script))

    try:
        result = asyncio.run(main())
    finally:
        asyncio.run(pool.close())
    assert result.status is ExecStatus.OK, result
    assert result.stdout.decode().split("\n")[:2] == [suite, "Status: install ok installed"]
    assert mirror not in repr(image)
