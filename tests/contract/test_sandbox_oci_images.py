"""Boxes with a root file system of their own, which no box may change."""

import asyncio
import os
import re
import secrets
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import pytest

from burnish.core.boxes import ExecResult, ExecStatus, Feature
from burnish.core.errors import UserError
from burnish.sandbox.config import SandboxConfig
from burnish.sandbox.engine.client import find_docker
from burnish.sandbox.engine.images import LABEL
from burnish.sandbox.engine.pool import DockerPool
from burnish.sandbox.oci.pool import OciPool

RUNTIMES = [
    "crun",
    pytest.param("runc", marks=pytest.mark.slow),
    pytest.param("runsc", marks=pytest.mark.slow),
    pytest.param("podman", marks=pytest.mark.slow),
    pytest.param("docker", marks=pytest.mark.slow),
]


class Image(NamedTuple):
    root: Path
    name: str = "small"
    digest: str = ""
    env: Mapping[str, str] = MappingProxyType({"SHAPE": "round", "COLOUR": "red"})
    workdir: str = ""
    user: str = ""


class Images:
    """Of one image, which may be absent."""

    def __init__(self, image: Image | None) -> None:
        self.image = image
        self.num_leases = 0

    def resolve(self, name: str) -> Image:
        if self.image is None:
            raise UserError(f"there is no image {name!r}.", fix="burnish sandbox image add")
        return self.image

    @contextmanager
    def lease(self, name: str) -> Iterator[Image]:
        image = self.resolve(name)
        self.num_leases += 1
        try:
            yield image
        finally:
            self.num_leases -= 1


@pytest.fixture
def image(tmp_path: Path) -> Image:
    """A shell, what it is linked to, and one file."""
    tmp_path.chmod(0o755)
    root = tmp_path / "an image: a,b"
    for program in ("/bin/sh", "/bin/cat"):
        linked = subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout
        for path in [program, *re.findall(r"(/\S+) \(0x", linked)]:
            copy = root / path[1:]
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, copy)
    (root / "marker").write_text("of the image\n", encoding="ascii")
    return Image(root)


def start(runtime: str, images: Images) -> OciPool | DockerPool:
    config = SandboxConfig(max_boxes=2)
    return DockerPool(config, images) if runtime == "docker" else OciPool(config, runtime, images)


def run(runtime: str, image: Image | None, script: str) -> ExecResult:
    # A daemon keeps images by their digest, and tests change what is in theirs.
    image = image and image._replace(digest=f"test-{secrets.token_hex(8)}")
    try:
        return run_as_it_is(runtime, image, script)
    finally:
        if runtime == "docker" and image is not None:
            forget(image.digest)


def forget(digest: str) -> None:
    try:
        docker = find_docker()
    except UserError:
        return
    for name in docker.call("images", "-q", f"--filter=label={LABEL}={digest}").split():
        docker.call("rmi", name)


def run_as_it_is(runtime: str, image: Image | None, script: str) -> ExecResult:
    async def main() -> ExecResult:
        images = Images(image)
        try:
            pool = start(runtime, images)
        except UserError as error:
            pytest.skip(str(error))
        try:
            assert Feature.IMAGES in pool.capabilities.features
            async with pool.acquire("small") as box:
                assert images.num_leases == 1
                await box.write_file("in", b"written\n")
                return await box.exec(("sh", "-c", script), env={"COLOUR": "blue"})
        finally:
            assert images.num_leases == 0
            await pool.close()

    return asyncio.run(main())


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_a_box_sees_its_image_and_nothing_of_this_machine(runtime: str, image: Image) -> None:
    script = (
        "cat /marker in; echo /*; [ -e /usr/bin/env ] || echo alone; echo x > /tmp/x && cat /tmp/x"
    )
    result = run(runtime, image, script)
    assert result.status is ExecStatus.OK, result
    first, second, listing, alone, x = result.stdout.decode().splitlines()
    assert (first, second, alone, x) == ("of the image", "written", "alone", "x")
    assert "/marker" in listing.split()
    assert {"/proc", "/work", "/tmp", "/dev"} <= set(listing.split())


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_no_box_writes_its_image(runtime: str, image: Image) -> None:
    before = sorted(image.root.rglob("*"))
    result = run(runtime, image, "(echo > /new) 2>&- || (echo > /marker) 2>&- || echo no")
    assert result.stdout == b"no\n"
    assert sorted(image.root.rglob("*")) == before
    assert (image.root / "marker").read_text(encoding="ascii") == "of the image\n"


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_an_image_without_a_shell_is_a_users_mistake(runtime: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"/bin/sh.*Fix: use the native sandbox"):
        run(runtime, Image(tmp_path), "true")


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize(("user", "seen"), [("", "0 0"), ("7:8", "7 8"), ("app", "1234 567")])
def test_commands_run_as_the_images_user(runtime: str, image: Image, user: str, seen: str) -> None:
    (image.root / "etc").mkdir()
    (image.root / "etc" / "passwd").write_text("app:x:1234:567::/:/bin/sh\n", encoding="ascii")
    script = (
        "while read -r name one _; do case $name in Uid:) u=$one;; Gid:) g=$one;; esac; done "
        "< /proc/self/status; echo $u $g; cat in; echo more >> in && echo x > new && cat in"
    )
    try:
        result = run(runtime, image._replace(user=user), script)
    except UserError as error:
        # An ordinary user may have no id for it: an error then, never another user.
        if os.getuid() == 0 or not user or "one id" not in error.what:
            raise
        return
    assert result.stdout.decode() == f"{seen}\nwritten\nwritten\nmore\n", result


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_a_user_whom_the_image_does_not_have_is_a_users_mistake(runtime: str, image: Image) -> None:
    with pytest.raises(UserError, match="nobody-of-this-name"):
        run(runtime, image._replace(user="nobody-of-this-name"), "true")


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_an_image_that_does_not_have_its_directory_is_a_users_mistake(
    runtime: str, image: Image
) -> None:
    with pytest.raises(UserError, match="/nowhere"):
        run(runtime, image._replace(workdir="/nowhere"), "true")


def test_an_image_that_the_store_does_not_know_is_a_users_mistake() -> None:
    with pytest.raises(UserError, match="small"):
        run("crun", None, "true")


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_commands_start_as_the_image_says(runtime: str, image: Image) -> None:
    (image.root / "srv").mkdir()
    told = image._replace(workdir="/srv")
    assert run(runtime, told, "pwd; echo $SHAPE $COLOUR").stdout == b"/srv\nround blue\n"
    assert run(runtime, image, "pwd").stdout == b"/work\n"
