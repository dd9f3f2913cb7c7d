import os
from pathlib import Path

import pytest

from burnish.core.disk import (
    DiskFullError,
    ensure_free_space,
    free_bytes,
    replaceable,
    write_atomically,
)
from burnish.core.errors import UserError


def test_writing_replaces_the_whole_file_and_leaves_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "a"
    write_atomically(path, b"long first content")
    write_atomically(path, b"second")
    assert path.read_bytes() == b"second"
    assert os.listdir(tmp_path) == ["a"]


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    (tmp_path / "directory" / "inner").mkdir(parents=True)
    with pytest.raises(OSError, match="irectory"):
        write_atomically(tmp_path / "directory", b"x")
    assert os.listdir(tmp_path) == ["directory"]


def test_space_is_checked_where_the_path_will_be(tmp_path: Path) -> None:
    ensure_free_space(tmp_path / "not" / "there", 1)
    needed = free_bytes(tmp_path) + 2**50
    with pytest.raises(DiskFullError, match=f"{needed:,} needed") as caught:
        ensure_free_space(tmp_path / "not" / "there", needed)
    assert str(tmp_path) in str(caught.value)


def test_what_is_no_regular_file_is_never_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    for name in ("pipe", "link"):
        with pytest.raises(UserError, match=r"no regular file.* Fix: give a file"):
            write_atomically(tmp_path / name, b"x")
    with open(tmp_path / "deleted", "wb") as file:
        os.unlink(file.name)
        with pytest.raises(UserError, match="no regular file"):
            replaceable(Path(f"/proc/self/fd/{file.fileno()}"))
    assert sorted(os.listdir(tmp_path)) == ["link", "pipe"]
    assert (tmp_path / "pipe").is_fifo()


def test_a_link_to_a_file_stays_and_the_file_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "link").symlink_to("file")
    assert replaceable(tmp_path / "link") == (tmp_path / "file").resolve()
    assert replaceable(tmp_path / "absent") == tmp_path / "absent"
