"""The kernels with AMX's tiles in plain C, for machines that have none; two ways.

`emulated`: the source of the real kernel (attention_amx.c) is compiled against `emulated_tiles.h`
for the vectors of this machine, and linked to the library that is installed: all else is that.

`trapped`: the machine code of the installed library itself. Each of its tile instructions is an
illegal one here, and a handler of that signal does what it should have done (`trapped_tiles.c`).
"""

import atexit
import ctypes
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, cast
from unittest import mock

from burnish.model.kernels import build, library
from burnish.model.kernels.library import Isa, Kernels, function, kernels
from burnish.model.kernels.tiles import Tiles

_HEADER = Path(__file__).with_name("emulated_tiles.h")


def emulation_problem() -> str | None:
    """Why nothing can be emulated here; None if it can."""
    if build.library_problem() is not None or _vectors() is Isa.TORCH:
        return "there is no library of the kernels to add emulated tiles to"
    return None if build.find_compiler() else "no compiler for emulated tiles"


def _vectors() -> Isa:
    """What this CPU has beside tiles."""
    return min(kernels().isa, Isa.AVX512_BF16, key=list(Isa).index)


@cache
def _folder() -> Path:
    folder = tempfile.TemporaryDirectory(prefix="burnish-tiles-")
    atexit.register(folder.cleanup)
    return Path(folder.name)


def _built(source: Path, *flags: str) -> Path:
    compiler, made = build.find_compiler(), _folder() / f"{source.stem}.so"
    assert compiler is not None
    # -O3 takes twice as long and changes no result.
    common = ["-O1" if flag == "-O3" else flag for flag in build.COMMON_FLAGS]
    command = [*compiler, *common, "-D_GNU_SOURCE", *flags, "-shared", str(source)]
    done = subprocess.run(
        [*command, str(build.LIBRARY), "-lm", "-o", str(made)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return made


@cache
def emulated_path() -> Path:
    """The library, built once per process."""
    vectors = build.flags_of(Path(f"attention_{_vectors()}.c"))
    header = f'-DTILES_HEADER="{_HEADER}"'
    return _built(build.SOURCES / "attention_amx.c", *vectors, header)


@cache
def emulated_library() -> ctypes.CDLL:
    """It loaded, where torch's OpenMP runtime is."""
    assert kernels().library is not None
    return ctypes.CDLL(str(emulated_path()))


class _Limited:
    """A library without the functions that this CPU cannot run."""

    def __init__(self, whole: ctypes.CDLL, vectors: Isa) -> None:
        self._whole, order = whole, list(Isa)
        self._missing = [f"_{isa}" for isa in order[order.index(vectors) + 1 : -1]]

    def __getattr__(self, name: str) -> Any:
        if name.endswith(tuple(self._missing)):
            raise AttributeError(name)
        return getattr(self._whole, name)


@contextmanager
def emulated() -> Iterator[None]:
    """This process has tiles."""
    limited = _Limited(emulated_library(), _vectors())
    found = Kernels(Isa.AMX, None, cast(ctypes.CDLL, limited))
    function.cache_clear()
    try:
        with mock.patch.object(library, "_loaded", return_value=found):
            yield
    finally:
        function.cache_clear()


def trapping_problem() -> str | None:
    """Why the real code cannot be trapped here; None if it can."""
    found = kernels()
    if found.isa is not Isa.AVX512_BF16 or found.library is None:
        return f"beside tiles the real code needs AVX512_BF16, here is {found.isa}"
    if found.library.burnish_tiles() != Tiles.ABSENT:
        return "this CPU has tiles: nothing traps"
    if not hasattr(found.library, "attend_pages_amx"):
        return "the compiler of the library knows no tiles"
    return None if build.find_compiler() else "no compiler for the handler"


@contextmanager
def trapped() -> Iterator[Callable[[], int]]:
    """The real library believes in tiles; yields how many instructions were trapped so far."""
    found = kernels()._replace(isa=Isa.AMX)
    handler = ctypes.CDLL(str(_built(_HEADER.with_name("trapped_tiles.c"), "-mfma")))
    function.cache_clear()
    assert handler.trap_tiles() == 0
    try:
        with mock.patch.object(library, "_loaded", return_value=found):
            yield handler.trapped_tiles
    finally:
        handler.leave_tiles()
        function.cache_clear()
    assert handler.emulated_tiles_left() == 0


def tiles_opened() -> int:
    """How many threads have loaded a configuration so far."""
    opened: int = emulated_library().emulated_tiles_opened()
    return opened


def tiles_left() -> int:
    """Configurations that threads still hold."""
    left: int = emulated_library().emulated_tiles_left()
    return left
