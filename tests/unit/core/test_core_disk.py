import os
from pathlib import Path

import pytest

from burnish.core.disk import DiskFullError, ensure_free_space, free_bytes, write_atomically


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
