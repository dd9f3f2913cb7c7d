"""A key/value cache of which only a part is in memory.

Every page keeps its address; what leaves memory is given back to the system under it and read from
the file when it is wanted again. Bounds of the keys stay in memory, so pages can be selected that
are not.

    write -> attend (require -> prefetch of the next layer -> compute) -> ...

Shapes as in `cache/storage.py`.
"""

import sys
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from burnish.core.errors import UserError
from burnish.core.vocabulary import KvDtype
from burnish.rollout.engine.cache.step import Choice, Step
from burnish.rollout.engine.cache.storage import KvCache, Losses
from burnish.rollout.engine.tier.frames import Frames
from burnish.rollout.engine.tier.limits import TierLimits, TierStats
from burnish.rollout.engine.tier.memory import PageMemory, memory_problem

Pages = NDArray[np.int64]
# Fewer frames than this would be read and written over and over within one step.
LEAST_FRAMES = 64


class _Group(NamedTuple):
    """Pieces of a step whose pages fit into memory together."""

    step: Step
    indices: slice
    """Their spans."""
    rows: slice
    """Their tokens."""
    pages: Pages


class TieredCache(KvCache):
    """Another cache within a budget of memory."""

    def __init__(self, inner: KvCache, limits: TierLimits, is_free: Callable[[int], bool]) -> None:
        """Nothing is kept yet.

        Args:
            inner: whose memory is watched; used through this object alone from now on.
            limits: sizes.
            is_free: whether the content of a page means nothing any more.

        Raises:
            UserError: if this machine or these sizes cannot be served.
        """
        super().__init__(inner.shape)
        self.inner = inner
        regions = inner.regions
        problem = memory_problem(regions[0])
        if problem is not None:
            off, model = "set engine.kv.disk_mb to 0", KvDtype.MODEL
            is_small = inner.shape.kv_dtype is not model and sys.platform.startswith("linux")
            raise UserError(
                f"engine.kv.disk_mb: {problem}.",
                fix=f"{off}, or engine.kv_dtype to {model}." if is_small else f"{off}.",
            )
        memories = [PageMemory(layer) for layer in regions]
        self._frames = Frames(memories, inner.shape.num_pages, limits, is_free)
        if self._frames.num_frames < LEAST_FRAMES:
            least = LEAST_FRAMES * memories[0].page_bytes
            self.close()
            raise UserError(
                f"engine.kv.ram_mb holds {self._frames.num_frames} pages of a layer, it must hold "
                f"{LEAST_FRAMES}.",
                fix=f"raise it to {-(-least // 2**20)}.",
            )
        self._grouped: tuple[Step, list[_Group]] | None = None
        self._last: list[Pages] = [np.zeros(0, dtype=np.int64)] * inner.shape.config.num_layers

    @property
    def stats(self) -> TierStats:
        """What happened so far."""
        return self._frames.stats

    @property
    def num_frames(self) -> int:
        """Pages of one layer that memory holds, all layers together."""
        return self._frames.num_frames

    @property
    def stores(self) -> list[list[Tensor]]:
        """Those of the inner cache; what is not in memory reads as zeros."""
        return self.inner.stores

    @property
    def regions(self) -> list[list[Tensor]]:
        """As `stores`."""
        return self.inner.regions

    def write(self, layer: int, step: Step, k_TKD: Tensor, v_TKD: Tensor) -> None:
        """Store the keys and values of the step's tokens."""
        slots = step.slots_T.numpy()
        pages, first = np.unique(slots // self.page_size, return_index=True)
        fresh = slots[first] % self.page_size == 0
        self._frames.begin(layer, pages, fresh=fresh)
        self.inner.write(layer, step, k_TKD, v_TKD)
        self._frames.unpin()

    def attend(self, layer: int, q_THD: Tensor, step: Step) -> Tensor:
        """Attention over what is stored."""
        # Every layer of a step asks for the same.
        if self._grouped is None or self._grouped[0] is not step:
            tables = [_there(view.pages) for view in step.views]
            self._grouped = step, _group(step, tables, self.num_frames)
        parts = []
        for group in self._grouped[1]:
            self._want(layer, group.pages)
            parts.append(self.inner.attend(layer, q_THD[group.rows], group.step))
            self._frames.unpin()
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def attend_chosen(self, layer: int, q_THD: Tensor, step: Step, choices: Seq[Choice]) -> Tensor:
        """Attention of each span over its choice alone."""
        tables = [np.unique(choice.pages_KN.numpy()).astype(np.int64) for choice in choices]
        parts = []
        for group in _group(step, tables, self.num_frames):
            self._want(layer, group.pages)
            chosen = choices[group.indices]
            parts.append(self.inner.attend_chosen(layer, q_THD[group.rows], group.step, chosen))
            self._frames.unpin()
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def mass(self, layer: int, q_BHD: Tensor, tables: Seq[Tensor], places: Seq[int]) -> Tensor:
        """How much attention falls on each page."""
        self._frames.require(layer, _there(torch.cat(list(tables)).tolist()))
        found = self.inner.mass(layer, q_BHD, tables, places)
        self._frames.unpin()
        return found

    def bound(self, layer: int, q_BHD: Tensor, tables: Seq[Seq[int] | Tensor]) -> Tensor:
        """Upper bounds on the scaled scores of each row's pages."""
        bounds_BHW = self.inner.bound(layer, q_BHD, tables)
        for table, bounds_HW in zip(tables, bounds_BHW, strict=True):
            pages = np.asarray(table, dtype=np.int64)
            scores = bounds_HW.amax(0)[: len(pages)].double().numpy()
            self._frames.score(layer, pages[pages >= 0], scores[pages >= 0])
        return bounds_BHW

    def copy_page(self, source: int, target: int) -> None:
        """Copy one page in every layer."""
        for layer, tensors in enumerate(self.stores):
            self._frames.require(layer, [source])
            self._frames.begin(layer, [target], fresh=np.array([True]))
            for tensor in tensors:
                tensor[target] = tensor[source]
            self._frames.unpin()

    def save_pages(self, pages: Seq[int]) -> list[list[Tensor]]:
        """Copies of pages, as `load_pages` takes them."""
        saved = []
        for layer, tensors in enumerate(self.stores):
            copies = [tensor.new_empty((len(pages), *tensor.shape[1:])) for tensor in tensors]
            for i, page in enumerate(pages):
                self._frames.require(layer, [page])
                for copy, tensor in zip(copies, tensors, strict=True):
                    copy[i] = tensor[page]
                self._frames.unpin()
            saved.append(copies)
        return saved

    def load_pages(self, saved: Seq[Seq[Tensor]], pages: Seq[int]) -> None:
        """Put saved pages into these, in order."""
        for layer, (tensors, copies) in enumerate(zip(self.stores, saved, strict=True)):
            for i, page in enumerate(pages):
                self._frames.begin(layer, [page], fresh=np.array([True]))
                for tensor, copy in zip(tensors, copies, strict=True):
                    tensor[page] = copy[i]
                self._frames.unpin()

    def clear_pages(self, pages: Seq[int]) -> None:
        """Zero them."""
        self._frames.forget(pages)
        self.inner.clear_pages(pages)

    def take_losses(self) -> Losses:
        """Pages whose content was lost since the last call, and why more cannot be kept."""
        frames = self._frames
        losses = Losses(frames.broken, frames.full)
        frames.broken, frames.full = {}, None
        return losses

    def close(self) -> None:
        """Give the disk back."""
        self._frames.close()

    def check(self) -> None:
        """Assert that the books are right."""
        self._frames.check()

    def _want(self, layer: int, pages: Pages) -> None:
        """Have pages for computing, and begin to read what comes after."""
        self._frames.require(layer, pages)
        self._last[layer] = pages
        following = (layer + 1) % len(self._last)
        # Layers of one token want the same regions more often than not, and so do two tokens.
        self._frames.prefetch(following, np.union1d(pages, self._last[following]))


def _there(pages: Seq[int]) -> Pages:
    found = np.unique(np.asarray(pages, dtype=np.int64))
    return found[found >= 0]


def _group(step: Step, tables: Seq[Pages], num_frames: int) -> list[_Group]:
    """Cut a step where the pages of its pieces would not fit together."""
    groups: list[_Group] = []
    first = row = begin = 0
    pages: Pages = np.zeros(0, dtype=np.int64)
    for i, table in enumerate(tables):
        both = np.union1d(pages, table)
        if len(both) > num_frames // 2 and i > first:
            groups.append(_cut(step, slice(first, i), slice(begin, row), pages))
            first, begin, both = i, row, table
        pages = both
        row += step.counts[i]
    groups.append(_cut(step, slice(first, len(tables)), slice(begin, row), pages))
    return groups


def _cut(step: Step, indices: slice, rows: slice, pages: Pages) -> _Group:
    if indices == slice(0, len(step.spans)):
        return _Group(step, indices, rows, pages)
    part = Step(step.spans[indices], step.page_size, step.visibility)
    return _Group(part, indices, rows, pages)
