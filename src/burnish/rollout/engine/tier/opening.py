"""The cache that an engine's limits ask for."""

from collections.abc import Callable

import torch

from burnish.core.vocabulary import KvPolicyKind
from burnish.model.config import ModelConfig
from burnish.rollout.engine.cache.opening import open_cache
from burnish.rollout.engine.cache.storage import CacheShape, KvCache
from burnish.rollout.engine.limits import CoreLimits
from burnish.rollout.engine.placement import find_device
from burnish.rollout.engine.tier.cache import TieredCache


def open_engine_cache(
    config: ModelConfig, dtype: torch.dtype, limits: CoreLimits, is_free: Callable[[int], bool]
) -> KvCache:
    """In memory alone, or on disk too.

    Args:
        config: the model.
        dtype: its numbers.
        limits: sizes of the engine.
        is_free: whether the content of a page means nothing any more.

    Raises:
        UserError: if the tiers are not possible here.
    """
    shape = CacheShape(
        config,
        limits.num_pages,
        limits.page_size,
        dtype,
        kv_dtype=limits.kv_dtype,
        with_bounds=limits.kv.kind is KvPolicyKind.QUEST,
        device=find_device(limits.device),
        flex=limits.flex,
        tiles=not limits.exact,
    )
    cache = open_cache(shape)
    return cache if limits.tier is None else TieredCache(cache, limits.tier, is_free)
