"""Pages in the layout of the native kernels."""

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from burnish.core.vocabulary import KvDtype
from burnish.model.kernels.attention import PagedLayer, PageKind, PageShape, SpanTable
from burnish.rollout.engine.cache.step import Step
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
            PagedLayer(page, shape.num_pages, with_bounds=shape.with_bounds)
            for _ in range(config.num_layers)
        ]
        self._planned: tuple[Step, SpanTable] | None = None

    @property
    def stores(self) -> list[list[Tensor]]:
        """Pages, then bounds if they are kept."""
        return [
            [layer.data] if layer.bounds is None else [layer.data, layer.bounds]
            for layer in self._layers
        ]

    def write(self, layer: int, step: Step, k_TKD: Tensor, v_TKD: Tensor) -> None:
        """Store the keys and values of the step's tokens."""
        self._layers[layer].write(step.slots_T, k_TKD, v_TKD)

    def attend(self, layer: int, q_THD: Tensor, step: Step) -> Tensor:
        """Attention over what is stored."""
        if self._planned is None or self._planned[0] is not step:
            self._planned = (step, _plan(step))
        return self._layers[layer].attend(q_THD, self._planned[1])

    def bound(self, layer: int, q_BHD: Tensor, tables: Seq[Seq[int]]) -> Tensor:
        """Upper bounds on the scaled scores of each row's pages."""
        pages = torch.tensor([page for table in tables for page in table], dtype=torch.int32)
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
