"""Keys and values from elsewhere into an engine's cache, where requests find them as a prefix."""

from collections.abc import Sequence as Seq

from torch import Tensor

from burnish.core.errors import UserError
from burnish.rollout.engine.cache.step import Span
from burnish.rollout.engine.cache.storage import KvCache
from burnish.rollout.engine.limits import CoreLimits
from burnish.rollout.engine.residency import Residency

# A tier brings the pages of one step into memory together.
_CHUNK_PAGES = 32


def adopt(
    cache: KvCache,
    memory: Residency,
    tokens: tuple[int, ...],
    layers: Seq[tuple[Tensor, Tensor]],
    limits: CoreLimits,
) -> int:
    """Write a prefix and make it known; how many of its tokens are.

    Args:
        cache: where it goes.
        memory: its books.
        tokens: the prefix; a page that is not full is left out.
        layers: keys and values [T, K, D] of each layer.
        limits: of the engine.

    Raises:
        UserError: if the engine promised bits or gives pages back while requests run.
    """
    if limits.exact or limits.kv.evicts:
        what = "engine.exact" if limits.exact else f"engine.kv.policy = {limits.kv.kind}"
        raise UserError(
            f"{what} cannot take over keys and values that others computed.",
            fix="let the engine read the prompt itself.",
        )
    size = cache.page_size

    def write(pages: list[int]) -> None:
        for begin in range(0, len(pages), _CHUNK_PAGES):
            end = min(begin + _CHUNK_PAGES, len(pages))
            step = cache.step([Span(pages, begin * size, end * size)])
            for layer, (k_TKD, v_TKD) in enumerate(layers):
                rows = slice(begin * size, end * size)
                cache.write(layer, step, k_TKD[rows], v_TKD[rows])

    return memory.adopt(tokens, None, write)
