"""Keys and values from elsewhere into an engine's cache, where requests find them as a prefix."""

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from burnish.core.errors import UserError
from burnish.model.config import ModelConfig
from burnish.rollout.engine.cache.step import Span
from burnish.rollout.engine.cache.storage import KvCache
from burnish.rollout.engine.limits import CoreLimits
from burnish.rollout.engine.placement import placed
from burnish.rollout.engine.residency import Residency
from burnish.rollout.engine.validation import check_ids

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
        UserError: if the engine promised bits or gives pages back while requests run, or the keys
            and values are not those of these tokens in this model.
    """
    if limits.exact or limits.kv.evicts:
        what = "engine.exact" if limits.exact else f"engine.kv.policy = {limits.kv.kind}"
        raise UserError(
            f"{what} cannot take over keys and values that others computed.",
            fix="let the engine read the prompt itself.",
        )
    _check(cache.shape.config, tokens, layers)
    size = cache.page_size

    def write(pages: list[int]) -> None:
        for begin in range(0, len(pages), _CHUNK_PAGES):
            end = min(begin + _CHUNK_PAGES, len(pages))
            rows, device = slice(begin * size, end * size), cache.shape.device
            with placed(device):
                step = cache.step([Span(pages, begin * size, end * size)])
            for layer, (k_TKD, v_TKD) in enumerate(layers):
                cache.write(layer, step, k_TKD[rows].to(device), v_TKD[rows].to(device))

    return memory.adopt(tokens, None, write)


def _check(
    config: ModelConfig, tokens: tuple[int, ...], layers: Seq[tuple[Tensor, Tensor]]
) -> None:
    check_ids("the adopted prefix", tokens, config.vocab_size)
    if len(layers) != config.num_layers:
        raise _refused(f"{len(layers)} layers, the model has {config.num_layers}")
    shape = (len(tokens), config.num_kv_heads, config.head_dim)
    for number, pair in enumerate(layers):
        for tensor in pair:
            if tuple(tensor.shape) != shape:
                raise _refused(f"layer {number} of shape {tuple(tensor.shape)}, {shape} fits")
            if not tensor.dtype.is_floating_point or not bool(torch.isfinite(tensor).all()):
                raise _refused(f"layer {number} not of finite floating-point numbers")


def _refused(why: str) -> UserError:
    return UserError(
        f"keys and values cannot be taken over: {why}.",
        fix="compute them with RingPrefill, from the configuration and weights served here.",
    )
