"""Every instruction set of this CPU, one after another in one process."""

from collections.abc import Iterator

import pytest

from burnish.model.kernels import library
from burnish.model.kernels.library import Isa, kernels

# Attention alone has code for tiles.
_ALL = [isa for isa in Isa if isa not in (Isa.TORCH, Isa.AMX)]


@pytest.fixture(params=_ALL)
def isa(request: pytest.FixtureRequest) -> Iterator[Isa]:
    """Restricts the kernels to `isa`; skips where the CPU or the build cannot."""
    found = kernels()
    wanted: Isa = request.param
    if _ALL.index(wanted) > list(Isa).index(found.isa) - 1:
        pytest.skip(f"{wanted}: {found.problem or f'this CPU has {found.isa}'}")
    with library.restricted(wanted):
        yield wanted
