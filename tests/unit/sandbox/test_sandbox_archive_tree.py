import errno
import os
import resource
from pathlib import Path

import pytest

from burnish.core.errors import UserError
from burnish.sandbox.archive import beneath
from burnish.sandbox.archive.beneath import PARENT, open_beneath
from burnish.sandbox.archive.removal import remove_tree


def folder(path: Path) -> int:
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY)


def test_nothing_outside_can_be_opened(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "secret").mkdir()
    (tmp_path / "in/up").symlink_to("..")
    (tmp_path / "in/abs").symlink_to(tmp_path / "secret")
    (tmp_path / "in/proc").symlink_to("/proc/self/cwd")
    top = folder(tmp_path / "in")
    for path in (b"..", b"up", b"up/secret", b"abs", b"proc", b"/", os.fsencode(tmp_path)):
        with pytest.raises(OSError, match=r".") as caught:
            open_beneath(top, path)
        assert caught.value.errno in (errno.ELOOP, errno.EXDEV, errno.ENOTDIR)
    inside = os.stat(top).st_ino
    for path in (b"up", b"up/up/up", b".."):
        descriptor = open_beneath(top, path, PARENT, follow=True)
        assert os.stat(descriptor).st_ino == inside, "the directory is its own root"
        os.close(descriptor)
    for path in (b"abs", b"up/secret", b"proc"):
        with pytest.raises(OSError, match=r".") as caught:
            open_beneath(top, path, PARENT, follow=True)
        assert caught.value.errno in (errno.ENOENT, errno.ELOOP)
    os.close(top)


def test_mounts_are_not_entered() -> None:
    top = folder(Path("/"))
    with pytest.raises(OSError, match=r".") as caught:
        open_beneath(top, b"proc/self")
    assert caught.value.errno == errno.EXDEV
    os.close(top)


def test_a_kernel_without_openat2_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beneath, "_OPENAT2", 100_000)
    with pytest.raises(UserError, match=r"openat2.*5\.6"):
        open_beneath(os.open("/", os.O_RDONLY), b"tmp")


def test_a_tree_is_removed_however_deep_wide_or_closed(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept/f").write_text("kept")
    top = folder(tmp_path)
    os.mkdir("tree", dir_fd=top)
    current = os.open("tree", os.O_RDONLY, dir_fd=top)
    for index in range(1500):
        if index % 100 == 0:
            os.symlink("/", "link", dir_fd=current)
            os.symlink(tmp_path / "kept", "kept", dir_fd=current)
        os.mkdir("d", dir_fd=current)
        below = os.open("d", os.O_RDONLY, dir_fd=current)
        os.close(current)
        current = below
    os.close(current)
    for index in range(1000):
        (tmp_path / f"tree/n{index}").mkdir(mode=0)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (100, hard))
    try:
        remove_tree(top, b"tree")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    remove_tree(top, b"tree")
    assert os.listdir(tmp_path) == ["kept"]
    (tmp_path / "link").symlink_to("kept")
    remove_tree(top, b"link")
    assert (tmp_path / "kept/f").read_text() == "kept"
    os.close(top)
