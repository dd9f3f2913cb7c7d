import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from burnish.model.kernels import build
from burnish.model.kernels.library import Isa, kernels

needs_library = pytest.mark.skipif(kernels().library is None, reason=str(kernels().problem))


def _isa_of_child(**environment: str) -> subprocess.CompletedProcess[str]:
    code = "from burnish.model.kernels.library import kernels; assert print(kernels().isa) is None"
    return subprocess.run(
        [sys.executable, "-c", code], env=os.environ | environment, capture_output=True, text=True
    )


@needs_library
def test_parallel_loops_run_on_the_one_pool_of_torch() -> None:
    library = kernels().library
    assert library is not None
    assert library.burnish_team_size(2) == 2
    # Numerical libraries may bring another runtime, but ours must not be a second libgomp.
    maps = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
    assert len([name for name in maps if "libgomp" in name]) == 1
    assert torch.get_num_threads() >= 1


@needs_library
@pytest.mark.parametrize("isa", ["torch", "avx2"])
def test_the_environment_chooses_the_instructions(isa: str) -> None:
    done = _isa_of_child(BURNISH_KERNELS=isa)
    assert done.stdout.strip() == isa, done.stderr


def test_an_unknown_choice_is_an_error_that_names_the_known_ones() -> None:
    done = _isa_of_child(BURNISH_KERNELS="sse9")
    assert "UserError" in done.stderr
    assert all(isa in done.stderr for isa in Isa)


def test_without_a_compiler_the_build_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", "")
    monkeypatch.setenv("PATH", str(tmp_path))
    problem = build.build_kernels(tmp_path / "k.so")
    if build.platform_problem() is None:
        assert problem is not None
        assert "apt-get install gcc" in problem
    assert not (tmp_path / "k.so").exists()


@needs_library
def test_a_failing_compiler_is_one_line_and_leaves_the_old_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "k.so"
    target.write_text("old")
    monkeypatch.setattr(build, "COMMON_FLAGS", ["-DDECLARE(x)=int y", "-nonsense-flag"])
    problem = build.build_kernels(target)
    assert problem is not None
    assert "\n" not in problem
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


def test_a_library_of_other_sources_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if build.platform_problem() is not None:
        pytest.skip("no kernels for this platform")
    stale = tmp_path / "k.so"
    stale.write_bytes(b"burnish-kernels-source:0123")
    monkeypatch.setattr(build, "LIBRARY", stale)
    assert "other sources" in str(build.library_problem())
    monkeypatch.setattr(build, "LIBRARY", tmp_path / "absent.so")
    assert "not built" in str(build.library_problem())


@needs_library
def test_the_library_here_is_the_build_of_the_sources_here() -> None:
    assert build.library_problem() is None
    assert ctypes.CDLL(str(build.LIBRARY)).burnish_best_isa() >= 1
