"""Pages in the layout of the native kernels."""

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from burnish.core.vocabulary import KvDtype
from burnish.model.kernels.attention import PagedLayer, PageKind, PageShape, SpanTable
from burnish.rollout.engine.cache.step import Choice, Step
from burnish.rollout.engine.cache.storage import CacheShape, KvCache

_KINDS = {KvDtype.INT8: PageKind.INT8, KvDtype.FP8: PageKind.FP8}


class PairedCache(KvCache):
    """Keys and values where neighbouring numbers lie as the instructions want them."""

    def __init__(self, shape: CacheShape) -> None:
        """Reserve the memory; it is taken as pages are first touched."""
        super().__init__(shape)
        own = PageKind.F32 if shape.dtype is torch.float32 else PageKind.BF16
        kind = _KINDS.get(shape.kv_dtype, own)
        config = shape.config
        page = PageShape(kind, shape.page_size, config.num_kv_heads, config.head_dim)
        self._layers = [
            PagedLayer(page, shape.num_pages, with_bounds=shape.with_bounds, with_tiles=shape.tiles)
            for _ in range(config.num_layers)
        ]

    @property
    def stores(self) -> list[list[Tensor]]:
        """Pages, then bounds if they are kept."""
        return [
            [layer.data] if layer.bounds is None else [layer.data, layer.bounds]
            for layer in self._layers
        ]

    @property
    def regions(self) -> list[list[Tensor]]:
        """One per layer."""
        return [[layer.data] for layer in self._layers]

    def write(self, layer: int, step: Step, k_TKD: Tensor, v_TKD: Tensor) -> None:
        """Store the keys and values of the step's tokens."""
        self._layers[layer].write(step.slots_T, k_TKD, v_TKD)

    def attend(self, layer: int, q_THD: Tensor, step: Step) -> Tensor:
        """Attention over what is stored."""
        if step.planned is None:
            step.planned = _plan(step)
        assert isinstance(step.planned, SpanTable)
        return self._layers[layer].attend(q_THD, step.planned)

    def attend_chosen(self, layer: int, q_THD: Tensor, step: Step, choices: Seq[Choice]) -> Tensor:
        """Attention of each span over its choice alone."""
        num_kv = self.shape.config.num_kv_heads
        tokens, heads, head_width = q_THD.shape
        q_TKGD = q_THD.reshape(tokens, num_kv, heads // num_kv, head_width)
        parts_KTGD, spans, pages, first, entry = [], [], [], 0, 0
        heads_K = torch.arange(num_kv, dtype=torch.int32)
        begin = 0
        for count, choice in zip(step.counts, choices, strict=True):
            # Every head is a sequence of its own over pages of one head.
            parts_KTGD.append(q_TKGD[begin : begin + count].transpose(0, 1).flatten(0, 1))
            width = choice.pages_KN.shape[1]
            pages.append((choice.pages_KN * num_kv + heads_K[:, None]).flatten())
            for _ in range(num_kv):
                spans.append((first, count, choice.start, entry, 0, 0))
                first, entry = first + count, entry + width
            begin += count
        table = SpanTable(torch.tensor(spans), torch.cat(pages))
        out_XGD = self._layers[layer].by_head().attend(torch.cat(parts_KTGD), table)
        outs = torch.split(out_XGD, [num_kv * count for count in step.counts])
        return torch.cat(
            [
                out.view(num_kv, count, -1, head_width).transpose(0, 1).flatten(1, 2)
                for out, count in zip(outs, step.counts, strict=True)
            ]
        )

    def mass(self, layer: int, q_BHD: Tensor, tables: Seq[Tensor], places: Seq[int]) -> Tensor:
        """How much attention falls on each page."""
        widths = [len(table) for table in tables]
        entry, spans = 0, []
        for row, (width, place) in enumerate(zip(widths, places, strict=True)):
            spans.append((row, 1, place, entry, 0, 0))
            entry += width
        table = SpanTable(torch.tensor(spans), torch.cat(list(tables)))
        return self._layers[layer].mass(q_BHD, table, max(widths))

    def bound(self, layer: int, q_BHD: Tensor, tables: Seq[Seq[int] | Tensor]) -> Tensor:
        """Upper bounds on the scaled scores of each row's pages."""
        pages = torch.cat([torch.as_tensor(table, dtype=torch.int32) for table in tables])
        starts = torch.tensor([0, *(len(table) for table in tables)]).cumsum(0)
        return self._layers[layer].bound(q_BHD, starts, pages)


def _plan(step: Step) -> SpanTable:
    """One table for all layers of a step."""
    pages, starts = step.pages_of_views()
    counts = torch.tensor(step.counts)
    window, sinks = step.visibility.window or 0, step.visibility.sinks
    columns = (
        counts.cumsum(0) - counts,
        counts,
        torch.tensor([view.start for view in step.views]),
        starts[:-1],
        torch.full_like(counts, window),
        torch.full_like(counts, sinks),
    )
    return SpanTable(torch.stack(columns, dim=1), pages)
