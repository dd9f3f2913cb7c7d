"""The native library, loaded once, and which of its instruction sets is used.

`BURNISH_KERNELS` overrides the choice: `avx2`, `avx512`, `avx512_bf16`, `amx`, or `torch` for none.
The library's parallel loops run on the threads of torch's own OpenMP runtime.
"""

import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from burnish.core.errors import UserError
from burnish.model.kernels.build import LIBRARY, library_problem, platform_problem
from burnish.model.kernels.tiles import Tiles, tiles_problem

_VARIABLE = "BURNISH_KERNELS"


class Isa(StrEnum):
    """Instructions that the kernels may use, from the least."""

    TORCH = "torch"
    """None of ours: plain PyTorch."""
    AVX2 = "avx2"
    """256-bit vectors with fused multiply-add."""
    AVX512 = "avx512"
    """512-bit vectors."""
    AVX512_BF16 = "avx512_bf16"
    """512-bit vectors and dot products of bf16 pairs."""
    AMX = "amx"
    """The same, and tiles of bf16 for attention that asks for them (`PagedLayer`)."""


class Kernels(NamedTuple):
    """What `kernels()` found."""

    isa: Isa
    """In use."""
    problem: str | None
    """Why it is `torch`, in one line; None if it is not, or was asked for."""
    library: ctypes.CDLL | None
    """Open library; None exactly if `isa` is `torch`."""
    tiles_problem: str | None = None
    """Why the CPU's tiles are not used, in one line; None if they are, or it has none."""

    @property
    def can_build(self) -> bool:
        """Whether installing again with a compiler would help."""
        return self.library is None and platform_problem() is None

    @property
    def prefers_onednn(self) -> bool:
        """Whether there are bf16 tiles here, which oneDNN uses and our products do not."""
        return self.library is not None and self.library.burnish_tiles() == Tiles.GRANTED


_restriction: ContextVar[Isa | None] = ContextVar("kernels", default=None)


@contextmanager
def restricted(isa: Isa) -> Iterator[None]:
    """Use no more than `isa` in this context; for tests and comparisons."""
    token = _restriction.set(isa)
    try:
        yield
    finally:
        _restriction.reset(token)


def kernels() -> Kernels:
    """What this process uses; never raises for what the machine lacks.

    Raises:
        UserError: if `BURNISH_KERNELS` asks for what is not known or not possible.
    """
    found, isa = _loaded(), _restriction.get()
    if isa is None:
        return found
    return Kernels(isa, None, None if isa is Isa.TORCH else found.library)


@cache
def function(name: str, isa: Isa, *arguments: type) -> Callable[..., int]:
    """The variant of `name` for the best instructions up to `isa`; some return a status."""
    library = _loaded().library
    assert library is not None
    order = list(Isa)
    for each in reversed(order[1 : order.index(isa) + 1]):
        found = getattr(library, f"{name}_{each}", None)
        if found is not None:
            found.argtypes, found.restype = arguments, ctypes.c_int
            variant: Callable[..., int] = found
            return variant
    raise AssertionError(f"no variant of {name} for {isa}")


@cache
def _loaded() -> Kernels:
    wanted = _wanted()
    if wanted is Isa.TORCH:
        return Kernels(Isa.TORCH, None, None)
    problem = library_problem()
    library = None if problem else _open()
    if problem is None and library is None:
        problem = "torch's OpenMP runtime was not found or does not fit"
    best = Isa.TORCH if library is None else list(Isa)[library.burnish_best_isa()]
    if best is Isa.TORCH and problem is None:
        problem = "this CPU has no AVX2"
    tiles = None
    if best is Isa.AVX512_BF16 and wanted in (None, Isa.AMX):
        assert library is not None
        if library.burnish_tiles() != Tiles.ABSENT:
            tiles = tiles_problem(library, LIBRARY, _runtimes())
            best = best if tiles else Isa.AMX
    if wanted is not None and list(Isa).index(wanted) > list(Isa).index(best):
        reason = problem or tiles or f"the CPU has {best}"
        raise UserError(
            f"{_VARIABLE}={wanted} is not possible here: {reason}.",
            fix=f"unset {_VARIABLE}, or set it to {best}.",
        )
    isa = wanted or best
    return Kernels(isa, problem, None if isa is Isa.TORCH else library, tiles)


def handles(*tensors: Tensor) -> bool:
    """Whether the kernels can work on these: bf16 on a CPU that has some."""
    return all(t.dtype is torch.bfloat16 and t.device.type == "cpu" for t in tensors) and (
        kernels().library is not None
    )


def _wanted() -> Isa | None:
    text = os.environ.get(_VARIABLE, "")
    if not text:
        return None
    if text not in list(Isa):
        raise UserError(
            f"{_VARIABLE}={text!r} is not a kind of kernel.",
            fix=f"set it to one of {', '.join(Isa)}, or unset it.",
        )
    return Isa(text)


def _runtimes() -> list[Path]:
    folder = Path(torch.__file__).parent
    return [*folder.glob("lib/libgomp*.so*"), *folder.parent.glob("torch.libs/libgomp*.so*")]


def _open() -> ctypes.CDLL | None:
    """The library bound to torch's OpenMP runtime, or None without that."""
    try:
        for runtime in _runtimes():
            # It is already loaded: this only makes its symbols visible to our library.
            ctypes.CDLL(str(runtime), mode=ctypes.RTLD_GLOBAL)
        # RTLD_NOW: a missing symbol must fail here, not abort the process in the first call.
        return ctypes.CDLL(str(LIBRARY), mode=os.RTLD_NOW | ctypes.RTLD_LOCAL)
    except OSError:
        return None
