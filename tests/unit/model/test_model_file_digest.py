"""The digest of a model's files, computed while they are loaded."""

import hashlib
import os
from concurrent.futures import CancelledError
from pathlib import Path

import pytest

from burnish.model.file_digest import FileDigest


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def test_one_file_has_the_digest_that_sha256sum_prints(tmp_path: Path) -> None:
    data = os.urandom(3 * 2**20 + 5)
    (tmp_path / "a").write_bytes(data)
    with FileDigest([tmp_path / "a"]) as digest:
        assert digest.result() == f"sha256:{sha256(data)}"


def test_shards_have_the_digest_of_their_list(tmp_path: Path) -> None:
    files = [tmp_path / "b", tmp_path / "a"]
    for file in files:
        file.write_bytes(file.name.encode())
    lines = f"b {sha256(b'b')}\na {sha256(b'a')}\n"
    with FileDigest(files) as digest:
        assert digest.result() == f"sha256:{sha256(lines.encode())}"


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with FileDigest([tmp_path / "a"]) as digest, pytest.raises(FileNotFoundError):
        digest.result()


def test_a_failed_load_does_not_wait_for_it(tmp_path: Path) -> None:
    """A tebibyte of zeros would take the better part of an hour."""
    with (tmp_path / "a").open("wb") as stream:
        stream.truncate(2**40)
    with pytest.raises(RuntimeError), FileDigest([tmp_path / "a"]) as digest:
        raise RuntimeError
    with pytest.raises(CancelledError):
        digest.result()
