"""The kernels' library: building it, and whether the one beside this file fits its sources.

The build hook of the package runs this file on its own, so it imports nothing of ours. One object
per source; the end of its name says for which instructions: `gemm_avx512_bf16.c`. None of them is
run on a CPU that lacks those, so one library serves every x86-64 machine.
"""

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

SOURCES = Path(__file__).with_name("native")
LIBRARY = Path(__file__).with_name("_kernels.so")
"""Where the build puts it; never under version control."""

INSTALL_FIX = "sudo apt-get install gcc libc6-dev, then install Burnish again (pip install -e .)"

# Sums keep the order that the source says (no -ffast-math): exact mode promises bits. Contraction
# to fused multiply-adds is off for the same reason: the source says where one is meant.
COMMON_FLAGS = [
    "-std=gnu11",
    "-Wall",
    "-Wextra",
    "-Werror",
    "-O3",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fPIC",
    "-fopenmp",
]
_AVX2 = ("-mavx2", "-mfma")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl")
_BF16 = (*_AVX512, "-mavx512bf16", "-mavx512vnni")
_TILE_FLAGS = ("-mamx-tile", "-mamx-bf16")
# Looked up by the end of the source's name, the longest first.
_ISA_FLAGS = {
    "_amx": (*_BF16, *_TILE_FLAGS),
    "_avx512_bf16": _BF16,
    "_avx512": _AVX512,
    "_avx2": _AVX2,
}
_MARK = b"burnish-kernels-source:"


@cache
def source_digest() -> str:
    """SHA-256 over names and contents of the sources."""
    digest = hashlib.sha256()
    for path in sorted(SOURCES.glob("*.[ch]")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def find_compiler() -> list[str] | None:
    """`$CC`, else `cc`, `gcc` or `clang`; None without any."""
    words = shlex.split(os.environ.get("CC", ""))
    if words:
        return words if shutil.which(words[0]) else None
    found = next((name for name in ("cc", "gcc", "clang") if shutil.which(name)), None)
    return [found] if found else None


def platform_problem() -> str | None:
    """Why there are no kernels for this kind of machine; None if there are."""
    machine = platform.machine().lower()
    if sys.platform == "linux" and machine in ("x86_64", "amd64"):
        return None
    return f"there are none for {sys.platform} on {machine}"


def build_kernels(destination: Path = LIBRARY, extra: Sequence[str] = ()) -> str | None:
    """Compile and link the library.

    Args:
        destination: replaced at once, so that a library in use stays whole.
        extra: more flags for compiler and linker, such as `-fsanitize=address`.

    Returns:
        None, or what went wrong, in one line.
    """
    problem = platform_problem()
    if problem is not None:
        return problem
    compiler = find_compiler()
    if compiler is None:
        return f"there is no C compiler ({INSTALL_FIX})"
    with tempfile.TemporaryDirectory(dir=destination.parent, prefix=".build-") as directory:
        objects = _compile([*compiler, *COMMON_FLAGS, *extra], Path(directory))
        if isinstance(objects, str):
            return objects
        made = Path(directory, "kernels.so")
        # Without -fopenmp here: the GOMP_* symbols stay open and bind to the runtime that torch
        # brought along. A second runtime would mean a second pool of threads on the same cores.
        problem = _run([*compiler, "-shared", *extra, "-o", str(made), *objects, "-lm"])
        if problem is None:
            made.replace(destination)
        return problem


def _compile(compiler: Sequence[str], directory: Path) -> list[str] | str:
    """An object of each source, or what went wrong in one line."""

    def compiled(source: Path) -> tuple[str, str | None]:
        made = str(directory / f"{source.stem}.o")
        return made, _run([*compiler, *flags_of(source), "-c", str(source), "-o", made])

    sources = sorted(SOURCES.glob("*.c"))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        results = list(pool.map(compiled, sources))
    objects: list[str] = []
    for source, (made, problem) in zip(sources, results, strict=True):
        if problem is None:
            objects.append(made)
        elif not source.stem.endswith("_amx") or _knows_tiles(compiler, directory):
            return problem
    return objects


def _knows_tiles(compiler: Sequence[str], directory: Path) -> bool:
    """Whether compiler and assembler know AMX: GCC and clang do from 11 and 12 on."""
    probe = directory / "probe.c"
    probe.write_text("#include <immintrin.h>\nvoid probe(void) { _tile_release(); }\n")
    made = str(probe.with_suffix(".o"))
    return _run([*compiler, *_TILE_FLAGS, "-c", str(probe), "-o", made]) is None


def library_problem() -> str | None:
    """Why there is no usable library, and the fix; None if there is one."""
    problem = platform_problem()
    if problem is not None:
        return problem
    if not LIBRARY.is_file():
        return "it was not built: install a C compiler, then Burnish again (pip install -e .)"
    if _MARK + source_digest().encode() not in LIBRARY.read_bytes():
        return "it was built from other sources: install Burnish again (pip install -e .)"
    return None


def flags_of(source: Path) -> tuple[str, ...]:
    """What the instructions of a source need beside the flags of all."""
    mark = f'-DSOURCE_DIGEST="{source_digest()}"'
    isa = next((flags for end, flags in _ISA_FLAGS.items() if source.stem.endswith(end)), ())
    return (mark, *isa)


def _run(command: list[str]) -> str | None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return None
    lines = done.stderr.strip().splitlines() or ["no message"]
    message = next((line for line in lines if "error" in line), lines[0])
    return f"the C compiler {command[0]} failed: {message}"
