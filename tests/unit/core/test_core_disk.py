import os
import subprocess
import sys
from pathlib import Path

import pytest

from burnish.core import disk
from burnish.core.disk import (
    DiskFullError,
    ensure_free_space,
    free_bytes,
    replaceable,
    replacing,
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


@pytest.fixture(params=["nameless", "hidden"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "hidden":
        monkeypatch.setattr(disk, "_nameless", lambda directory: None)
    return str(request.param)


def test_a_file_takes_its_place_when_it_is_whole(tmp_path: Path, way: str) -> None:
    path = tmp_path / "a"
    for content in (b"first", b"second"):
        with replacing(path) as file:
            file.write(content)
            assert not path.exists() or path.read_bytes() == b"first"
            assert len(set(os.listdir(tmp_path)) - {"a"}) == (way == "hidden")
        assert path.read_bytes() == content
        assert os.listdir(tmp_path) == ["a"]


def test_a_replacement_that_fails_leaves_the_old_file_and_no_other(
    tmp_path: Path, way: str
) -> None:
    (tmp_path / "a").write_bytes(b"old")

    def fail() -> None:
        with replacing(tmp_path / "a") as file:
            file.write(b"new")
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert os.listdir(tmp_path) == ["a"]
    assert (tmp_path / "a").read_bytes() == b"old"


def test_a_writer_that_is_killed_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"old")
    code = (
        "import os, sys; from pathlib import Path; from burnish.core.disk import replacing\n"
        "with replacing(Path(sys.argv[1])) as file:\n"
        "    file.write(b'new' * 2**20); os.kill(os.getpid(), 9)"
    )
    done = subprocess.run((sys.executable, "-c", code, str(tmp_path / "a")), check=False)
    assert done.returncode == -9
    assert os.listdir(tmp_path) == ["a"]
    assert (tmp_path / "a").read_bytes() == b"old"


def test_a_file_of_the_longest_name_takes_its_place(tmp_path: Path, way: str) -> None:
    for name in ("n" * 255, "\u20ac" * 85):
        with replacing(tmp_path / name) as file:
            file.write(b"whole")
        assert (tmp_path / name).read_bytes() == b"whole"
    assert len(os.listdir(tmp_path)) == 2


def test_a_directory_is_no_place_for_a_file(tmp_path: Path, way: str) -> None:
    for place in (tmp_path, Path(".")):
        with pytest.raises(OSError, match=r"irectory|busy"), replacing(place) as file:
            file.write(b"lost")
    assert os.listdir(tmp_path) == []
