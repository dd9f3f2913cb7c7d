"""What the engine needs of a place for keys and values.

Two exist: `paired.py` for the native kernels, `gathered.py` for PyTorch's operators. Pages are
numbers; who owns which is the page pool's business.

Shapes: T tokens, B rows, H query heads, K key/value heads, D head width, W pages of a row.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence as Seq
from typing import NamedTuple

import torch
from torch import Tensor

from burnish.core.vocabulary import KvDtype
from burnish.model.config import ModelConfig
from burnish.rollout.engine.cache.step import Choice, Span, Step, Visibility


class CacheShape:
    """Sizes and numbers of a cache."""

    def __init__(
        self,
        config: ModelConfig,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        *,
        kv_dtype: KvDtype = KvDtype.MODEL,
        sinks: int = 0,
        with_bounds: bool = False,
        device: torch.device | None = None,
        flex: bool = False,
        tiles: bool = False,
    ) -> None:
        """Describe a cache.

        Args:
            config: the model; its sliding window is kept.
            num_pages: pages in each layer.
            page_size: tokens of a page.
            dtype: numbers of the model.
            kv_dtype: numbers of the cache.
            sinks: first tokens that stay visible beyond a sliding window.
            with_bounds: keep the least and greatest key of each page, for `KvCache.bound`.
            device: where it lies; None: in this machine's memory.
            flex: on CUDA, attend by PyTorch's flex attention.
            tiles: where the CPU has tiles, read prompts by them; not for what must be exact.
        """
        self.config, self.num_pages, self.page_size = config, num_pages, page_size
        self.dtype, self.kv_dtype, self.with_bounds = dtype, kv_dtype, with_bounds
        self.visibility = Visibility(config.sliding_window, sinks)
        self.device, self.flex, self.tiles = device or torch.device("cpu"), flex, tiles


class KvCache(ABC):
    """Keys and values of all layers, in pages."""

    def __init__(self, shape: CacheShape) -> None:
        """Keep the sizes; subclasses take the memory."""
        self.shape, self.page_size = shape, shape.page_size

    def step(self, spans: Seq[Span]) -> Step:
        """Lay out one step over this cache; spans of one token each come first."""
        return Step(spans, self.page_size, self.shape.visibility)

    @abstractmethod
    def write(self, layer: int, step: Step, k_TKD: Tensor, v_TKD: Tensor) -> None:
        """Store the keys and values of the step's tokens."""

    @abstractmethod
    def attend(self, layer: int, q_THD: Tensor, step: Step) -> Tensor:
        """Attention over what is stored, the step's own tokens included; [T, H, D]."""

    @abstractmethod
    def attend_chosen(self, layer: int, q_THD: Tensor, step: Step, choices: Seq[Choice]) -> Tensor:
        """Attention of each span over its choice alone; where that is all pages, the same bits."""

    @abstractmethod
    def mass(self, layer: int, q_BHD: Tensor, tables: Seq[Tensor], places: Seq[int]) -> Tensor:
        """How much attention falls on each page: log of summed exponentials, fp32 [B, H, W].

        Args:
            layer: whose keys.
            q_BHD: one query token per row.
            tables: pages of each row, int32, -1 for none.
            places: of the query among the keys of its pages; later keys count nothing.
        """

    @abstractmethod
    def bound(self, layer: int, q_BHD: Tensor, tables: Seq[Seq[int] | Tensor]) -> Tensor:
        """Upper bounds on the scaled scores of each row's pages, fp32 [B, H, W].

        Quest (Tang et al. 2024, eq. 2): the sum over d of max(q_d * least_d, q_d * greatest_d).
        Padding and pages -1 have -inf. Only where the cache was made `with_bounds`.
        """

    @property
    @abstractmethod
    def stores(self) -> list[list[Tensor]]:
        """Per layer, the tensors that hold it; pages are their first axis."""

    @property
    @abstractmethod
    def regions(self) -> list[list[Tensor]]:
        """Per layer, uint8 [pages, bytes] over the memory of keys and values, bounds excepted."""

    def take_losses(self) -> "Losses":
        """Pages whose content was lost since the last call, and why more cannot be kept."""
        return Losses({}, None)

    def close(self) -> None:  # noqa: B027
        """Give back what is not memory; most caches are nothing else."""

    def copy_page(self, source: int, target: int) -> None:
        """Copy one page in every layer."""
        for tensors in self.stores:
            for tensor in tensors:
                tensor[target] = tensor[source]

    def save_pages(self, pages: Seq[int]) -> list[list[Tensor]]:
        """Copies of pages in this machine's memory: per layer, tensors [pages, ...]."""
        index = self._index(pages)
        return [[tensor.index_select(0, index).cpu() for tensor in each] for each in self.stores]

    def load_pages(self, saved: Seq[Seq[Tensor]], pages: Seq[int]) -> None:
        """Put saved pages into these, in order, in a cache of the same kind and shape."""
        index = self._index(pages)
        for tensors, copies in zip(self.stores, saved, strict=True):
            for tensor, copy in zip(tensors, copies, strict=True):
                tensor.index_copy_(0, index, copy.to(tensor.device))

    def clear_pages(self, pages: Seq[int]) -> None:
        """Zero them: what is masked may still be multiplied, so it must be finite."""
        index = self._index(pages)
        for tensors in self.stores:
            for tensor in tensors:
                tensor.index_fill_(0, index, 0)

    def _index(self, pages: Seq[int]) -> Tensor:
        return torch.tensor(list(pages), dtype=torch.int64, device=self.shape.device)

    @property
    def num_bytes_per_page(self) -> int:
        """Bytes of one page in all layers."""
        return sum(t[:1].numel() * t.element_size() for each in self.stores for t in each)

    @property
    def num_bytes(self) -> int:
        """Bytes of all pages, touched or not."""
        return self.num_bytes_per_page * self.shape.num_pages


class Losses(NamedTuple):
    """What a cache could not keep."""

    pages: dict[int, str]
    """Pages whose content is gone, and what happened."""
    full: str | None
    """Why no more can be kept; None if it can."""


class StepAttend:
    """The decoder's `Attend` for one step: stores the new keys and values, then reads pages."""

    def __init__(self, cache: KvCache, step: Step) -> None:
        """Attention of `step` over `cache`."""
        self._cache, self._step = cache, step

    def __call__(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        """Attend in `layer`; returns [T, H, D]."""
        self._cache.write(layer, self._step, k_TKD, v_TKD)
        return self._cache.attend(layer, q_THD, self._step)
