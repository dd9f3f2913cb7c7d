"""Whether tiles (AMX) are used: what the machine, the build and the self-check say."""

import ctypes
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from emulated_tiles import emulated_library, emulated_path, emulation_problem

from burnish.cli.machine import Status, _kernels
from burnish.core.errors import UserError
from burnish.model.kernels import build, library
from burnish.model.kernels.library import Isa, kernels
from burnish.model.kernels.tiles import self_check_problem

needs_emulation = pytest.mark.skipif(
    emulation_problem() is not None, reason=str(emulation_problem())
)
needs_library = pytest.mark.skipif(kernels().library is None, reason=str(kernels().problem))


def flushed(x: np.ndarray) -> np.ndarray:
    """fp32 numbers without subnormal ones."""
    x = x.astype(np.float32)
    return np.where(np.abs(x) < 2.0**-126, np.float32(0), x)


def narrowed(x: np.ndarray) -> np.ndarray:
    """Upper halves of fp32 numbers."""
    return (x.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


@needs_emulation
def test_the_emulated_product_is_that_of_the_instructions_description() -> None:
    g = np.random.default_rng(0)
    left, right = narrowed(g.standard_normal((16, 32))), narrowed(g.standard_normal((16, 16, 2)))
    sums = g.standard_normal((16, 16)).astype(np.float32)
    left[3, 4:6] = 1, 0x8001  # subnormal: zeros
    left[5], sums[5] = 0, 0
    sums[5, 0] = 1e-39
    left[6], sums[6] = narrowed(np.full(32, 2e-38)), 0  # products far below the least number
    expected = np.empty((16, 16), np.float32)
    wide_left, wide_right = (
        np.where(x & 0x7F80, x, 0).astype(np.uint32) << 16 for x in (left, right)
    )
    a, b = wide_left.view(np.float32), wide_right.view(np.float32)
    for m in range(16):
        chains = np.zeros((16, 2), np.float64)
        for k in range(16):
            # The product of two bf16 numbers is exact in double, and so is nearly every sum.
            products = a[m, 2 * k : 2 * k + 2].astype(np.float64) * b[k].astype(np.float64)
            chains = flushed(chains + products).astype(np.float64)
        expected[m] = flushed(flushed(sums[m]) + flushed(chains[:, 0] + chains[:, 1]))
    found = sums.copy()
    address = [x.ctypes.data_as(ctypes.c_void_p) for x in (found, left, right.copy())]
    emulated_library().emulated_product(*address)
    np.testing.assert_array_equal(found, expected)


@needs_emulation
@pytest.mark.parametrize(
    ("fault", "words"), [("", None), ("swapped", "other results"), ("illegal", "died of SIG")]
)
def test_the_self_check_finds_wrong_products_and_outlives_illegal_instructions(
    fault: str, words: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EMULATED_FAULT", fault)
    problem = self_check_problem(emulated_path(), library._runtimes())
    assert (problem is None) if words is None else (words in str(problem))


@needs_emulation
def test_a_self_check_that_cannot_run_is_a_line_too(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = emulated_path().with_name("absent.so")
    assert "did not run (status 1)" in str(self_check_problem(absent, ()))
    monkeypatch.setattr(sys, "executable", str(absent))
    assert "FileNotFoundError" in str(self_check_problem(emulated_path(), ()))


@needs_emulation
@pytest.mark.skipif(
    kernels().isa not in (Isa.AVX512_BF16, Isa.AMX), reason="tiles need AVX512_BF16 beside them"
)
@pytest.mark.parametrize(
    ("answer", "fault", "isa", "words"),
    [
        ("2", "", Isa.AMX, ""),
        ("0", "", Isa.AVX512_BF16, ""),
        ("1", "", Isa.AVX512_BF16, "Linux 5.16"),
        ("2", "illegal", Isa.AVX512_BF16, "died of SIG"),
        ("2", "swapped", Isa.AVX512_BF16, "other results"),
    ],
)
def test_tiles_are_used_only_if_granted_and_right_and_doctor_says_why_not(
    answer: str, fault: str, isa: Isa, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("EMULATED_TILES", answer), ("EMULATED_FAULT", fault)):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("BURNISH_KERNELS", raising=False)
    monkeypatch.setattr(library, "LIBRARY", emulated_path())
    found = library._loaded.__wrapped__()
    assert (found.isa, found.problem) == (isa, None)
    assert words in (found.tiles_problem or "")
    assert bool(found.tiles_problem) == bool(words)
    monkeypatch.setattr(library, "_loaded", lambda: found)
    row = _kernels()
    assert row.status is (Status.WARN if words else Status.OK)
    assert words in row.detail
    assert "\n" not in row.detail
    monkeypatch.undo()


@needs_library
@pytest.mark.skipif(kernels().isa is Isa.AMX, reason="this CPU has tiles")
def test_asking_for_tiles_that_are_not_there_is_one_clear_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("BURNISH_KERNELS", "amx")
    with pytest.raises(UserError, match="BURNISH_KERNELS=amx is not possible here") as found:
        library._loaded.__wrapped__()
    assert "unset BURNISH_KERNELS" in found.value.fix
    assert "\n" not in str(found.value)


@needs_library
@pytest.mark.skipif(shutil.which("objdump") is None, reason="objdump is not installed")
def test_the_library_has_tile_instructions_and_their_configuration_off_the_stack() -> None:
    library = kernels().library
    if not hasattr(library, "attend_pages_amx"):
        pytest.skip("the compiler of the library knows no tiles")
    done = subprocess.run(
        ["objdump", "-d", "--no-show-raw-insn", str(build.LIBRARY)], capture_output=True, text=True
    )
    code = [line.split("\t")[1].split() for line in done.stdout.splitlines() if "\t" in line]
    tiles = [words for words in code if words and words[0].startswith(("td", "tile", "ldtile"))]
    assert {words[0] for words in tiles} == {
        *("ldtilecfg", "tilerelease", "tilezero", "tileloadd", "tilestored", "tdpbf16ps")
    }
    # Parts of one on the stack are taken for unused and left out (GCC 12).
    assert all("(%rip)" in words[1] for words in tiles if words[0] == "ldtilecfg")


@pytest.mark.skipif(build.find_compiler() is None, reason="no compiler")
@pytest.mark.parametrize("knows", [False, True])
def test_a_compiler_without_tiles_builds_all_else_and_an_error_of_ours_is_not_taken_for_one(
    knows: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if build.platform_problem() is not None:
        pytest.skip("no kernels for this platform")
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "plain.c").write_text("int plain(void) { return 7; }\n")
    (sources / "attention_amx.c").write_text("int broken(void) { return }\n")
    compiler = tmp_path / "old-cc"
    real = " ".join(build.find_compiler() or ())
    refusal = 'case " $* " in *-mamx-*) echo "error: unknown option -mamx-tile" >&2; exit 1;; esac'
    compiler.write_text(f'#!/bin/sh\n{"" if knows else refusal}\nexec {real} "$@"\n')
    compiler.chmod(compiler.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("CC", str(compiler))
    monkeypatch.setattr(build, "SOURCES", sources)
    problem = build.build_kernels(tmp_path / "k.so")
    if knows:
        assert "error: expected expression" in str(problem)
        assert not (tmp_path / "k.so").exists()
        return
    assert problem is None
    made = ctypes.CDLL(str(tmp_path / "k.so"))
    assert made.plain() == 7
    assert not hasattr(made, "attend_pages_amx")
