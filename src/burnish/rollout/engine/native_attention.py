"""Attention of one engine step by the native kernels: a token's bits depend on its own keys alone.

Shapes: T tokens, H query heads, K key/value heads, D head width.
"""

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from burnish.model.config import ModelConfig
from burnish.model.kernels.attention import (
    PagedLayer,
    PageKind,
    PageShape,
    SpanTable,
    attention_problem,
)
from burnish.rollout.engine.cache_attention import CachedAttend, PagedCache, Span


class NativeCache:
    """Storage for keys and values of all layers, in the kernels' layout."""

    def __init__(self, config: ModelConfig, num_pages: int, page_size: int) -> None:
        """Zero-filled: untouched pages cost no memory."""
        self.page_size, self.config = page_size, config
        shape = PageShape(PageKind.BF16, page_size, config.num_kv_heads, config.head_dim)
        self.layers = [PagedLayer(shape, num_pages) for _ in range(config.num_layers)]

    def copy_page(self, source: int, target: int) -> None:
        """Copy one page in every layer."""
        for layer in self.layers:
            layer.data[target] = layer.data[source]


class NativeAttend:
    """An `Attend` for one step: writes the new keys and values, then reads pages."""

    def __init__(self, cache: NativeCache, spans: Seq[Span]) -> None:
        """Lay out one step; the tokens of a span follow each other in the flat batch."""
        self._cache = cache
        size, window = cache.page_size, cache.config.sliding_window or 0
        slots: list[int] = []
        rows: list[tuple[int, ...]] = []
        tables: list[int] = []
        first = 0
        for pages, start, end in spans:
            slots += [pages[p // size] * size + p % size for p in range(start, end)]
            rows.append((first, end - start, start, len(tables), window, 0))
            tables += pages[: -(-end // size)]
            first += end - start
        self._slots_T = torch.tensor(slots)
        self._table = SpanTable(torch.tensor(rows), torch.tensor(tables, dtype=torch.int32))

    def __call__(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        """Attend in `layer`; returns [T, H, D]."""
        store = self._cache.layers[layer]
        store.write(self._slots_T, k_TKD, v_TKD)
        return store.attend(q_THD, self._table)


def make_cache(
    config: ModelConfig, num_pages: int, page_size: int, dtype: torch.dtype
) -> PagedCache | NativeCache:
    """The best that this machine, model and type allow."""
    problem = attention_problem(config.head_dim, page_size, dtype)
    if problem is None and dtype is torch.bfloat16:
        return NativeCache(config, num_pages, page_size)
    return PagedCache(config, num_pages, page_size, dtype)


def attend_for(
    cache: PagedCache | NativeCache, spans: Seq[Span], num_singles: int
) -> CachedAttend | NativeAttend:
    """The attention of one step; the first `num_singles` spans have one token each."""
    if isinstance(cache, NativeCache):
        return NativeAttend(cache, spans)
    return CachedAttend(cache, spans, num_singles)
