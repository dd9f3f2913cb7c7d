"""Attention by PyTorch's flex attention: pages are read where they lie, by a mask of blocks.

The memory is that of `GatheredCache`: keys of all pages side by side are one long sequence, which
every row shares. A block of the mask is a page; which pages a row attends is data, what it sees of
them is a function of the place. Compiled on CUDA; elsewhere PyTorch computes every score of the
pool and masks it, which serves tests.

Not run on a GPU by its authors so far. Shapes: T tokens, B rows, H query heads, K key/value heads,
D head width, P pages of the pool, S page size, Q blocks of queries.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from burnish.rollout.engine.cache.gathered import GatheredCache
from burnish.rollout.engine.cache.step import Step, View, Visibility
from burnish.rollout.engine.cache.storage import CacheShape

_QUERY_BLOCK = 128


class _Group(NamedTuple):
    rows: slice
    """Tokens in the flat batch."""
    num_rows: int
    """Sequences among which they are divided evenly."""
    mask: BlockMask


class FlexCache(GatheredCache):
    """Keys and values as in `GatheredCache`, attended by flex attention."""

    def __init__(self, shape: CacheShape) -> None:
        """Take the memory."""
        super().__init__(shape)
        self._flex: Callable[..., Any] = flex_attention
        if shape.device.type == "cuda":
            self._flex = torch.compile(flex_attention, dynamic=True)
        self._groups: list[_Group] = []
        self._laid_out: Step | None = None

    def attend(self, layer: int, q_THD: Tensor, step: Step) -> Tensor:
        """Attention over what is stored."""
        if self._laid_out is not step:
            self._groups, self._laid_out = self._lay_out(step), step
        k_KND, v_KND = self._numbers[layer].flatten(1, 2).chunk(2)
        out_THD = torch.empty_like(q_THD, memory_format=torch.contiguous_format)
        for group in self._groups:
            q_THD_group = q_THD[group.rows]
            q_BTHD = q_THD_group.reshape(group.num_rows, -1, *q_THD.shape[1:])
            found_BHTD = self._flex(
                q_BTHD.transpose(1, 2),
                k_KND[None],
                v_KND[None],
                block_mask=group.mask,
                scale=self._scale,
                enable_gqa=True,
            )
            out_THD[group.rows] = found_BHTD.transpose(1, 2).reshape(q_THD_group.shape)
        return out_THD

    def _lay_out(self, step: Step) -> list[_Group]:
        """Single tokens together, every prompt by itself."""
        groups, first = [], step.num_singles
        if first:
            mask = self._mask(step.views[:first], 1, step.visibility)
            groups.append(_Group(slice(0, first), first, mask))
        for i in range(step.num_singles, len(step.spans)):
            rows = slice(first, first + step.counts[i])
            mask = self._mask(step.views[i : i + 1], step.counts[i], step.visibility)
            groups.append(_Group(rows, 1, mask))
            first = rows.stop
        return groups

    def _mask(self, views: Sequence[View], count: int, visibility: Visibility) -> BlockMask:
        """What `count` tokens of each view see."""
        size, num_pages = self.page_size, self.shape.num_pages
        num_blocks = -(-count // _QUERY_BLOCK)
        places_BP = torch.full((len(views), num_pages), -1)
        numbers_B1Q = torch.zeros((len(views), 1, num_blocks), dtype=torch.int32)
        pages_B1QP = torch.zeros((len(views), 1, num_blocks, num_pages), dtype=torch.int32)
        for row, view in enumerate(views):
            held = [(i, page) for i, page in enumerate(view.pages) if page >= 0]
            pages = torch.tensor([page for _, page in held])
            places_BP[row, pages] = torch.tensor([i for i, _ in held])
            for block in range(num_blocks):
                last = view.start + min((block + 1) * _QUERY_BLOCK, count) - 1
                seen = sum(i * size <= last for i, _ in held)
                numbers_B1Q[row, 0, block] = seen
                pages_B1QP[row, 0, block, :seen] = pages[:seen].int()
        starts_B = torch.tensor([view.start for view in views])
        window, sinks = visibility

        def sees(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            page = places_BP[b, kv // size]
            key, place = page * size + kv % size, starts_B[b] + q
            visible = (page >= 0) & (key <= place)
            if window is not None:
                visible = visible & ((key > place - window) | (key < sinks))
            return visible

        return BlockMask.from_kv_blocks(
            numbers_B1Q,
            pages_B1QP,
            BLOCK_SIZE=(_QUERY_BLOCK, size),
            mask_mod=sees,
            seq_lengths=(count, num_pages * size),
        )
