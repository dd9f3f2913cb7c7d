"""What killed processes left is removed, and nothing else."""

import os
import tempfile
from pathlib import Path

import pytest

from burnish.sandbox.cgroup import owner_name
from burnish.sandbox.leftovers import sweep_leftovers


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path


def test_files_of_the_dead_go_and_those_of_the_living_stay(temporary: Path) -> None:
    namespace = os.stat("/proc/self/ns/pid").st_ino
    dead = temporary / f"burnish-{namespace}-{os.getpid()}-1-abcd.spool"
    stay = [
        temporary / f"{owner_name()}-abcd.spool",
        temporary / f"burnish-1-{os.getpid()}-1-abcd.spool",
        temporary / "burnish-mine",
    ]
    for folder in (dead, *stay):
        folder.mkdir()
        (folder / "file").touch()
    link = temporary / f"burnish-{namespace}-{os.getpid()}-2-abcd.spool"
    link.symlink_to(stay[-1])
    found = [row.path for row in sweep_leftovers() if row.kind == "temporary files"]
    assert found == [str(dead)]
    assert all((folder / "file").exists() for folder in stay)
    assert link.is_symlink()


def test_what_its_owner_removes_meanwhile_is_no_error(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    namespace = os.stat("/proc/self/ns/pid").st_ino
    gone = temporary / f"burnish-{namespace}-{os.getpid()}-1-abcd.spool"
    monkeypatch.setattr(Path, "iterdir", lambda folder: iter([gone] if folder == temporary else []))
    assert [row for row in sweep_leftovers() if row.kind == "temporary files"] == []
