"""The sandbox backends that this machine can try. Every suite runs against all of them."""

import asyncio
from collections.abc import Callable, Iterator

import pytest

from burnish.core.boxes import SandboxPool
from burnish.core.errors import UserError
from burnish.sandbox.bubblewrap.pool import BubblewrapPool
from burnish.sandbox.config import SandboxConfig

MakePool = Callable[[int], SandboxPool]
"""From the number of boxes that may live at once."""

# A new backend is one more entry here.
BACKENDS: dict[str, MakePool] = {
    "bubblewrap": lambda n: BubblewrapPool(SandboxConfig(max_boxes=n)),
    "bubblewrap-sampled": lambda n: BubblewrapPool(
        SandboxConfig(max_boxes=n, control_groups=False)
    ),
}
# Their single tests are so slow that only `make test-slow` runs them.
SLOW: frozenset[str] = frozenset()


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in BACKENDS
    ],
)
def backend(request: pytest.FixtureRequest) -> MakePool:
    return BACKENDS[request.param]


@pytest.fixture(scope="module")
def pool(backend: MakePool) -> Iterator[SandboxPool]:
    try:
        made = backend(4)
    except UserError as error:
        pytest.skip(str(error))
    yield made
    asyncio.run(made.close())
