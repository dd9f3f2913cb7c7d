"""The engine's attention over a packed layout; the backward is that of `train.attention`.

Every segment gets the pages that the engine would give it: whole pages of a shared prefix are
shared, the rest of the prefix is copied before the segment's own tokens. The kernel's result
depends on a token's own keys alone, so the bits are those of decoding.

Shapes: T stored tokens, H query heads, K key/value heads, D head width, S page slots that are used.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from burnish.model.config import ModelConfig
from burnish.model.kernels.attention import (
    UNIT_KEYS,
    PagedLayer,
    PageKind,
    PageShape,
    SpanTable,
)
from burnish.train.attention import PackedBackward
from burnish.train.layout import Block, Layout, Segment


class ExactAttention:
    """An `Attend` over one layout."""

    def __init__(self, layout: Layout, config: ModelConfig) -> None:
        """Lay out the pages, once for all layers."""
        self._layout, self._window = layout, config.sliding_window
        plan = _plan(layout, config.sliding_window)
        shape = PageShape(PageKind.BF16, UNIT_KEYS, config.num_kv_heads, config.head_dim)
        self._pages = _Pages(plan, PagedLayer(shape, plan.num_pages))

    def __call__(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        """Outputs [T, H, D]."""
        out: Tensor = _Exact.apply(  # type: ignore[no-untyped-call]
            q_THD, k_TKD, v_TKD, self._layout.blocks, self._window, self._pages
        )
        return out


class _Plan(NamedTuple):
    num_pages: int
    rows_S: Tensor
    slots_S: Tensor
    table: SpanTable


class _Pages(NamedTuple):
    plan: _Plan
    store: PagedLayer


class _Exact(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_THD: Tensor,
        k_TKD: Tensor,
        v_TKD: Tensor,
        blocks: tuple[Block, ...],
        window: int | None,
        pages: _Pages,
    ) -> Tensor:
        ctx.save_for_backward(q_THD, k_TKD, v_TKD)
        ctx.blocks, ctx.window = blocks, window
        plan, store = pages
        store.write(
            plan.slots_S, k_TKD.index_select(0, plan.rows_S), v_TKD.index_select(0, plan.rows_S)
        )
        return store.attend(q_THD, plan.table)

    @staticmethod
    def backward(ctx: Any, dout_THD: Tensor) -> tuple[Tensor | None, ...]:
        q_THD, k_TKD, v_TKD = ctx.saved_tensors
        backward = PackedBackward(q_THD, k_TKD, v_TKD, ctx.blocks, ctx.window)
        grads = backward.run(dout_THD)
        return *grads, None, None, None


def _plan(layout: Layout, window: int | None) -> _Plan:
    builder = _Builder(window or 0)
    for block in layout.blocks:
        if not block.prefix.length:
            for segment in segments_of(block):
                builder.add(segment, Segment(0, 0), [])
    for block in layout.blocks:
        if block.prefix.length:
            shared = builder.pages_of[block.prefix.start][: block.prefix.length // UNIT_KEYS]
            for segment in segments_of(block):
                builder.add(segment, block.prefix, shared)
    return builder.plan()


class _Builder:
    """Hands out pages to segments."""

    def __init__(self, window: int) -> None:
        self.pages_of: dict[int, list[int]] = {}
        self._window, self._num_pages = window, 0
        self._rows: list[int] = []
        self._slots: list[int] = []
        self._spans: list[tuple[int, ...]] = []
        self._tables: list[int] = []

    def add(self, segment: Segment, prefix: Segment, shared: list[int]) -> None:
        """Give `segment` the `shared` pages of `prefix`, and new ones for all else that it sees."""
        covered = len(shared) * UNIT_KEYS
        rows = [*range(prefix.start + covered, prefix.start + prefix.length)]
        rows += range(segment.start, segment.start + segment.length)
        first = self._num_pages * UNIT_KEYS
        self._rows += rows
        self._slots += range(first, first + len(rows))
        num_new = -(-len(rows) // UNIT_KEYS)
        pages = [*shared, *range(self._num_pages, self._num_pages + num_new)]
        self._num_pages += num_new
        self._spans.append(
            (segment.start, segment.length, prefix.length, len(self._tables), self._window, 0)
        )
        self._tables += pages
        self.pages_of[segment.start] = pages

    def plan(self) -> _Plan:
        """The whole layout."""
        table = SpanTable(torch.tensor(self._spans), torch.tensor(self._tables, dtype=torch.int32))
        return _Plan(self._num_pages, torch.tensor(self._rows), torch.tensor(self._slots), table)


def segments_of(block: Block) -> list[Segment]:
    """The real runs of rows in a block."""
    owners = block.slots_M // block.length
    lengths = torch.bincount(owners, minlength=block.num_segments).tolist()
    starts = block.rows_SL.view(block.num_segments, block.length)[:, 0].tolist()
    return [Segment(start, length) for start, length in zip(starts, lengths, strict=True)]
