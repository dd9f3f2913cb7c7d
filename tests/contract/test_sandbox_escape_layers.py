"""Hostile use of layers: overlays' own marks, what siblings share, what leaves as a tar."""

import asyncio
import os
import re
import shutil
import subprocess
import tarfile
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, cast

import pytest

from burnish.core.boxes import (
    ExecStatus,
    Feature,
    Limits,
    Policy,
    Privileges,
    SandboxPool,
    StatefulSandbox,
)
from burnish.core.errors import UserError
from burnish.sandbox.config import SandboxConfig
from burnish.sandbox.images.store import ImageStore
from burnish.sandbox.interpreter import python_argv
from burnish.sandbox.native.pool import NativePool

Use = Callable[[StatefulSandbox], Coroutine[Any, Any, Any]]


@pytest.fixture
def stateful(pool: SandboxPool) -> SandboxPool:
    if Feature.SNAPSHOTS not in pool.capabilities.features:
        pytest.skip(f"the {pool.capabilities.backend} sandbox has no snapshots")
    return pool


def in_box(pool: SandboxPool, use: Use, policy: Policy | None = None) -> Any:
    async def main() -> Any:
        async with pool.acquire(policy=policy) as box:
            return await use(cast(StatefulSandbox, box))

    return asyncio.run(main())


async def python(box: StatefulSandbox, code: str, **limits: Any) -> list[str]:
    result = await box.exec(python_argv("-c", code), limits=Limits(**limits))
    assert result.status is ExecStatus.OK, result
    return result.stdout.decode().splitlines()


FORGE = """
for kind in ("user", "trusted", "user.overlay", "security"):
    for name, value in (("opaque", b"y"), ("opaque", b"x"), ("redirect", b"/usr"),
                        ("redirect", b"../../../usr"), ("metacopy", b""), ("metacopy", bytes(40)),
                        ("origin", bytes(40)), ("impure", b"y"), ("whiteout", b""),
                        ("nlink", b"U+1"), ("upper", bytes(40)), ("protattr", b"i"),
                        ("overlay.redirect", b"/usr"), ("capability", bytes(20))):
        for target in ("d", "d/file", ".", "/tmp"):
            prefix = kind if kind == "security" else kind + ".overlay"
            print(attempt(lambda: os.setxattr(target, f"{prefix}.{name}", value)))
for target in ("d/whiteout", "/tmp/whiteout", "/dev/shm/whiteout"):
    print(attempt(lambda: os.mknod(target, 0o020000, 0)))
libc.renameat2(-100, b"d/file", -100, b"d/moved", 4)   # RENAME_WHITEOUT
libc.renameat2(-100, b"d", -100, b"d2", 2)             # RENAME_EXCHANGE
"""
LOOK = """
import os
for top in ("/work", "/tmp"):
    for folder, folders, files in os.walk(top):
        folders.sort()
        for name in sorted(files + folders):
            path = os.path.join(folder, name)
            status = os.lstat(path)
            text = open(path, "rb").read()[:40] if os.path.isfile(path) else b""
            print(path, oct(status.st_mode), status.st_rdev, text)
"""


def test_forged_marks_of_overlays_mean_nothing_in_later_layers(
    stateful: SandboxPool, prelude: str, tmp_path: Path
) -> None:
    """Neither in a snapshot, nor in a fork, nor in what an export brings to a new box."""

    async def use(box: StatefulSandbox) -> None:
        await python(box, "import os; os.mkdir('d'); open('d/file', 'w').write('mine')")
        await box.snapshot()
        await python(box, prelude + FORGE)
        before = await python(box, LOOK)
        assert not [line for line in before if "libc" in line or "python3" in line]
        snapshot = await box.snapshot()
        assert await python(box, LOOK) == before
        async with box.fork(1, snapshot) as (fork,):
            assert await python(fork, LOOK) == before
        await box.export_tar(tmp_path / "state.tar", snapshot)
        async with stateful.acquire() as other:
            fresh = cast(StatefulSandbox, other)
            await fresh.import_tar(tmp_path / "state.tar")
            assert await python(fresh, LOOK) == before

    in_box(stateful, use)


@pytest.mark.parametrize("name", [".wh.file", ".wh..wh..opq", "d/.wh.d", ".wh..wh..wh.x"])
def test_names_that_mean_deleted_in_archives_are_not_exported(
    stateful: SandboxPool, tmp_path: Path, name: str
) -> None:
    async def use(box: StatefulSandbox) -> None:
        await box.write_file(name, b"x")
        with pytest.raises(ValueError, match=r"\.wh\."):
            await box.export_tar(tmp_path / "state.tar")

    in_box(stateful, use)


def test_an_export_holds_no_device_no_right_and_no_owner_of_the_host(
    stateful: SandboxPool, prelude: str, tmp_path: Path
) -> None:
    code = """
import shutil, socket
shutil.copy("/usr/bin/id", "id"); os.chmod("id", 0o6755)
os.mkfifo("pipe"); socket.socket(socket.AF_UNIX).bind("socket")
attempt(lambda: os.setxattr("id", "security.capability",
        bytes.fromhex("0100000200040000000000000000000000000000")))
attempt(lambda: os.mknod("disk", 0o060666, os.makedev(8, 0)))
attempt(lambda: os.mknod("memory", 0o020666, os.makedev(1, 1)))
os.link("id", "again"); os.symlink("/etc/shadow", "link")
attempt(lambda: os.chown("id", 0, 0))
with open("sparse", "wb") as file: attempt(lambda: file.truncate(1 << 50)); file.truncate(1 << 22)
"""
    privileges = [Privileges.NONE]
    if Feature.PRIVILEGES in stateful.capabilities.features:
        privileges.append(Privileges.PACKAGES)

    def check(path: Path) -> None:
        with tarfile.open(path) as archive:
            for entry in archive:
                assert not entry.name.startswith("/"), entry.name
                assert ".." not in entry.name.split("/"), entry.name
                assert entry.uid < 65536, entry.name
                assert not any("security." in key for key in entry.pax_headers), entry.name
                assert not entry.ischr() or entry.devmajor == entry.devminor == 0, entry.name
                assert not entry.isblk(), entry.name
        assert path.stat().st_size < 1 << 24

    for number, privilege in enumerate(privileges):
        path = tmp_path / f"{number}.tar"

        async def use(box: StatefulSandbox, path: Path = path) -> None:
            await python(box, prelude + code)
            await box.export_tar(path)

        in_box(stateful, use, Policy(privileges=privilege))
        check(path)


POISON = """
import mmap, stat
held = os.open("secret", os.O_RDONLY)
def shared():
    writable = os.open("mapped", os.O_RDWR)
    mmap.mmap(writable, 4096, mmap.MAP_SHARED)[0:4] = b"EVIL"
for what in (
    lambda: open("secret", "w").write("EVIL"), lambda: os.truncate("grown", 0), shared,
    lambda: os.chmod("mode", 0o777), lambda: os.utime("mode", (0, 0)),
    lambda: os.setxattr("mode", "user.mark", b"EVIL"), lambda: os.unlink("gone"),
    lambda: os.rename("moved", "elsewhere"), lambda: os.link("linked", "other"),
    lambda: open("other", "a").write("EVIL"), lambda: os.rmdir("folder"),
    lambda: open("other2", "r+").write("EVIL"),
    lambda: libc.fallocate(os.open("punched", os.O_RDWR), 3, ctypes.c_long(0), ctypes.c_long(4096)),
    lambda: os.posix_fallocate(os.open("grown", os.O_RDWR), 0, 8192),
    lambda: os.symlink("/tmp", "folder2"), lambda: os.replace("swap", "swapped"),
    lambda: os.copy_file_range(held, os.open("ranged", os.O_RDWR), 4),
):
    attempt(what)
"""
FILES = ["secret", "mapped", "grown", "mode", "gone", "moved", "linked", "punched", "swap"]
FILES += ["swapped", "ranged"]
MAKE = f"""
import os
for name in {FILES}: open(name, "w").write("real" * 2000)
os.mkdir("folder"); os.link("linked", "other2")
"""
STATE = """
import hashlib, os
for folder, folders, files in os.walk("/work"):
    folders.sort()
    for name in sorted(files + folders):
        path = os.path.join(folder, name); status = os.stat(path)
        digest = hashlib.sha256(open(path, "rb").read()).hexdigest() if name in files else ""
        print(path, oct(status.st_mode), status.st_mtime_ns, digest, os.listxattr(path))
"""


def test_no_box_poisons_what_its_siblings_stand_on(stateful: SandboxPool, prelude: str) -> None:
    async def use(box: StatefulSandbox) -> None:
        await python(box, MAKE)
        snapshot = await box.snapshot()
        before = await python(box, STATE)
        async with box.fork(2, snapshot) as (evil, sibling):
            assert await python(sibling, STATE) == before
            await python(evil, prelude + POISON)
            assert await python(evil, STATE) != before
            assert await python(sibling, STATE) == before
            await evil.snapshot()
            assert await python(sibling, STATE) == before
        assert await python(box, STATE) == before
        await python(box, prelude + POISON)
        await box.rollback(snapshot)
        assert await python(box, STATE) == before

    in_box(stateful, use)


def test_files_renamed_and_written_during_a_snapshot_leave_a_whole_state(
    stateful: SandboxPool,
) -> None:
    if Feature.BACKGROUND not in stateful.capabilities.features:
        pytest.skip("nothing runs while a snapshot is made")
    code = """
import os, threading
os.mkdir("a"); open("a/file", "w").write("x" * 100000); open("ready", "w").close()
def churn(n):
    while True:
        try:
            os.rename("a", "b"); os.rename("b", "a")
            open(f"new{n}", "w").write("y" * 10000); os.replace(f"new{n}", f"file{n}")
            os.symlink("/etc", f"l{n}"); os.replace(f"l{n}", f"link{n}")
        except OSError: pass
for n in range(4): threading.Thread(target=churn, args=(n,)).start()
"""
    start = "python3 -I -S churn.py >/dev/null 2>&1 & while ! [ -e ready ]; do sleep 0.01; done"

    async def use(box: StatefulSandbox) -> None:
        await box.write_file("churn.py", code.encode())
        await box.exec(("sh", "-c", start), keep=True)
        snapshot = await box.snapshot()
        first = await python(box, STATE)
        assert [line for line in first if "/file " in line]
        # What churned is gone: the state stands still.
        assert await python(box, STATE) == first
        async with box.fork(1, snapshot) as (fork,):
            assert await python(fork, STATE) == first

    in_box(stateful, use)


# Images


@pytest.fixture
def images(tmp_path: Path) -> ImageStore:
    """A shell and what it is linked to, in a store of its own."""
    tmp_path.chmod(0o755)
    source = tmp_path / "source"
    programs = [shutil.which(name) or "" for name in ("sh", "cat", "rm", "chmod", "mv", "ln", "ls")]
    for program in filter(None, programs):
        linked = subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout
        for path in [program, *re.findall(r"(/\\S+) \\(0x".replace("\\\\", "\\"), linked)]:
            copy = source / path[1:]
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, copy)
    if not (source / "bin/sh").exists():
        (source / "bin").mkdir(exist_ok=True)
        shutil.copy("/bin/sh", source / "bin/sh")
    (source / "marker").write_text("of the image\n", encoding="ascii")
    (source / "usr/bin/tool").write_text("#!/bin/sh\n", encoding="ascii")
    store = ImageStore(tmp_path / "images")
    store.add_directory("small", source)
    return store


VANDAL = """
echo EVIL > /marker; echo EVIL >> /usr/bin/tool; chmod 777 /usr/bin/tool /marker /usr
rm -f /bin/cat; mv /usr/bin/tool /usr/bin/other; ln -s /etc/shadow /usr/bin/tool
ln /marker /hard; echo EVIL > /hard; echo EVIL > /new; rm -rf /usr/bin/ls /lib64 /lib; echo done
"""


@pytest.mark.parametrize("helper", ["c", "python"])
@pytest.mark.parametrize("privileges", [Privileges.NONE, Privileges.PACKAGES])
def test_an_image_is_the_same_after_any_box(
    images: ImageStore, helper: Any, privileges: Privileges
) -> None:
    async def main() -> bytes:
        try:
            pool = NativePool(SandboxConfig(max_boxes=2, helper=helper), images=images)
        except UserError as error:
            pytest.skip(str(error))
        if privileges is not Privileges.NONE and (
            Feature.PRIVILEGES not in pool.capabilities.features
        ):
            await pool.close()
            pytest.skip("an ordinary user has no further ids: see /etc/subuid")
        try:
            policy = Policy(privileges=privileges)
            async with pool.acquire("small", policy) as box:
                state = cast(StatefulSandbox, box)
                said = await box.exec(("/bin/sh", "-c", VANDAL))
                assert said.stdout == b"done\n", said
                await state.snapshot()
            async with pool.acquire("small", policy) as box:
                return (await box.exec(("cat", "/marker", "/usr/bin/tool"))).stdout
        finally:
            await pool.close()

    assert asyncio.run(main()) == b"of the image\n#!/bin/sh\n"
    assert images.verify("small")
    assert os.path.exists("/etc/passwd")
