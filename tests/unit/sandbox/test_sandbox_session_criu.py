import os
import shutil
from pathlib import Path

import pytest

from burnish.sandbox.session import criu
from burnish.sandbox.session.criu import criu_probe


def program(tmp_path: Path, text: str) -> str:
    path = tmp_path / "criu"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_no_criu_is_told_with_a_fix(tmp_path: Path) -> None:
    found = criu_probe(str(tmp_path / "absent"))
    assert not found.usable
    assert found.detail == "no criu"
    assert "install CRIU 4" in found.fix


@pytest.mark.parametrize(
    ("text", "detail"),
    [
        ("echo 'Version: 3.17.1'", "version 3.17.1"),
        ("echo nonsense; exit 1", "does not say its version"),
        ("echo 'Version: '$(printf '%09999d' 1)", "version 000000"),
        ("kill -9 $$", "does not say its version"),
    ],
)
def test_what_is_not_a_new_criu_is_refused(tmp_path: Path, text: str, detail: str) -> None:
    found = criu_probe(program(tmp_path, text))
    assert not found.usable
    assert detail in found.detail
    assert found.fix


@pytest.mark.skipif(os.geteuid() != 0, reason="namespaces of processes need root: run as root")
@pytest.mark.parametrize(
    ("text", "detail"),
    [
        ("exit 1", "dump: exit status 1"),
        ('echo "no vDSO" > "$5/$7"; exit 1', "no vDSO"),
        # A criu that claims to have done it all: the process was never dumped, so it still lives.
        ("exit 0", "TimeoutExpired"),
    ],
)
def test_a_new_version_proves_nothing_until_it_works(
    tmp_path: Path, text: str, detail: str
) -> None:
    path = program(tmp_path, f'if [ "$1" = --version ]; then echo Version: 4.2; exit; fi\n{text}')
    found = criu_probe(path)
    assert detail in found.detail
    assert not found.usable


@pytest.mark.skipif(os.geteuid() != 0, reason="namespaces of processes need root: run as root")
def test_a_criu_that_hangs_is_ended_with_all_that_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(criu, "_DEADLINE_S", 1.0)
    mark = f"/{os.getpid()}.77"
    hang = f'if [ "$1" = --version ]; then echo Version: 4.2; exit; fi; exec sleep 1{mark[1:]}'
    found = criu_probe(program(tmp_path, hang))
    assert not found.usable
    assert "no end within" in found.detail
    lines = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if alive(path)]
    assert not any(mark[1:].encode() in line for line in lines)


def alive(path: Path) -> bool:
    try:
        return bool(path.read_bytes())
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.skipif(shutil.which("criu") is None, reason="no criu here: install CRIU 4 to run this")
def test_the_criu_of_this_host_is_judged_without_an_exception() -> None:
    found = criu_probe()
    assert found.usable == (found.fix == "")
