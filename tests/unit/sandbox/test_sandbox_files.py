import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from burnish.core.errors import FileTooLargeError
from burnish.sandbox.files import read_file, split_path, write_file


@pytest.fixture
def box(tmp_path: Path) -> Iterator[tuple[int, Path]]:
    folder = tmp_path / "work"
    folder.mkdir()
    (tmp_path / "secret").write_text("secret")
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    yield descriptor, folder
    os.close(descriptor)


@given(path=st.text(st.sampled_from("./a\0b"), max_size=12))
def test_a_path_that_is_accepted_stays_below(path: str) -> None:
    try:
        parts = split_path(path)
    except ValueError:
        return
    assert parts
    assert not {"..", ".", ""} & set(parts)
    assert os.path.normpath("/w/" + path) == "/w/" + "/".join(parts)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    data=st.binary(max_size=10_000),
    parts=st.lists(st.sampled_from(["a", "b", ".c", "d e"]), min_size=1, max_size=3),
    limit=st.integers(0, 12_000),
)
def test_what_was_written_is_read_whole_or_not_at_all(
    box: tuple[int, Path], data: bytes, parts: list[str], limit: int
) -> None:
    path = "/".join([*(f"dir {part}" for part in parts[:-1]), parts[-1]])
    write_file(box[0], path, data, None)
    if len(data) <= limit:
        assert read_file(box[0], path, limit) == data
        return
    with pytest.raises(FileTooLargeError, match=f"{parts[-1]} has {len(data)} bytes") as refused:
        read_file(box[0], path, limit)
    assert refused.value.size_bytes == len(data)


def test_links_out_are_not_followed(box: tuple[int, Path]) -> None:
    descriptor, folder = box
    (folder / "link").symlink_to("../secret")
    (folder / "way").symlink_to("..")
    for path in ("link", "way/secret"):
        with pytest.raises(FileNotFoundError):
            read_file(descriptor, path, 100)
    with pytest.raises(NotADirectoryError):
        write_file(descriptor, "way/new", b"x", None)
    write_file(descriptor, "link", b"mine", None)
    assert (folder.parent / "secret").read_text() == "secret"
    assert not (folder.parent / "new").exists()


def test_what_is_no_file_is_not_read(box: tuple[int, Path]) -> None:
    descriptor, folder = box
    os.mkfifo(folder / "pipe")
    (folder / "folder").mkdir()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / "socket"))
        for path in ("pipe", "folder", "socket", "absent", "pipe/x"):
            with pytest.raises(FileNotFoundError):
                read_file(descriptor, path, 100)


def test_a_failed_write_leaves_nothing(box: tuple[int, Path]) -> None:
    descriptor, folder = box
    (folder / "taken").mkdir()
    with pytest.raises(OSError, match="directory"):
        write_file(descriptor, "taken", b"x", None)
    assert os.listdir(folder) == ["taken"]


def test_no_descriptor_leaks(box: tuple[int, Path]) -> None:
    before = os.listdir("/proc/self/fd")
    write_file(box[0], "a/b/c", b"x", None)
    read_file(box[0], "a/b/c", 1)
    for path in ("a/b", "a/b/c/d", "z"):
        with pytest.raises(FileNotFoundError):
            read_file(box[0], path, 1)
    with pytest.raises(OSError, match="directory"):
        write_file(box[0], "a/b/c/d", b"x", None)
    assert os.listdir("/proc/self/fd") == before


def test_files_are_plain_and_belong_to_the_box(box: tuple[int, Path]) -> None:
    write_file(box[0], "f", b"x", None)
    mode = (box[1] / "f").stat().st_mode
    assert stat.S_IMODE(mode) & 0o7133 == 0
