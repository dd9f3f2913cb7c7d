"""Attention by FlashInfer's kernels on CUDA: pages are read where they lie, nothing is gathered.

The memory is that of `GatheredCache`. FlashInfer takes pages by their strides, so its "HND" layout
[P, K, S, D] is a view of it. One plan serves all layers of a step.

Not run on a GPU by its authors so far: written to the documented interface of FlashInfer 0.7 (whose
`plan` and `run` are stable since 0.2) and tested against a stand-in of that interface.

Shapes: T tokens, H query heads, K key/value heads, D head width, P pages, S page size, N spans.
"""

import importlib
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from burnish.core.vocabulary import KvDtype
from burnish.rollout.engine.cache.gathered import GatheredCache
from burnish.rollout.engine.cache.step import Step
from burnish.rollout.engine.cache.storage import CacheShape

_HEAD_WIDTHS = (64, 128, 256)
_WORKSPACE_BYTES = 128 << 20


def flashinfer_problem(shape: CacheShape) -> str | None:
    """Why its kernels cannot serve a cache of this shape; None if they can."""
    if shape.device.type != "cuda":
        return f"it needs CUDA, not {shape.device}"
    if find_spec("flashinfer") is None:
        return "the package flashinfer-python is not installed"
    if shape.dtype not in (torch.bfloat16, torch.float16) or shape.kv_dtype is not KvDtype.MODEL:
        return f"{shape.dtype} with keys and values as {shape.kv_dtype}"
    if shape.config.head_dim not in _HEAD_WIDTHS:
        return f"heads are {shape.config.head_dim} wide"
    if shape.visibility.sinks:
        return "tokens stay visible beyond the window"
    return None


class FlashInferCache(GatheredCache):
    """Keys and values as in `GatheredCache`, attended by FlashInfer."""

    def __init__(self, shape: CacheShape) -> None:
        """Take the memory, and 128 MiB for partial results."""
        super().__init__(shape)
        num_kv = shape.config.num_kv_heads
        by_page = [numbers.transpose(0, 1) for numbers in self._numbers]
        self._pages = [(pages[:, :num_kv], pages[:, num_kv:]) for pages in by_page]
        """Keys and values of each layer, [P, K, S, D]."""
        flashinfer: Any = importlib.import_module("flashinfer")
        workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=shape.device)
        self._kernel: Any = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "HND")
        self._laid_out: Step | None = None
        """The step that the kernel is planned for; one of drafts may come between two layers'."""

    def attend(self, layer: int, q_THD: Tensor, step: Step) -> Tensor:
        """Attention over what is stored."""
        if any(min(view.pages) < 0 for view in step.views):
            return super().attend(layer, q_THD, step)
        if self._laid_out is not step:
            self._lay_out(step)
            self._laid_out = step
        found: Tensor = self._kernel.run(q_THD.contiguous(), self._pages[layer])
        return found

    def _lay_out(self, step: Step) -> None:
        config, window, size = self.shape.config, step.visibility.window, self.page_size
        pages, starts = step.pages_of_views()
        ends = [view.start + count for view, count in zip(step.views, step.counts, strict=True)]
        self._kernel.plan(
            torch.tensor([0, *step.counts]).cumsum(0).int(),
            starts.int(),
            pages,
            torch.tensor([(end - 1) % size + 1 for end in ends], dtype=torch.int32),
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            size,
            causal=True,
            sm_scale=config.head_dim**-0.5,
            # Inclusive of the token itself.
            window_left=-1 if window is None else window - 1,
            q_data_type=self.shape.dtype,
            kv_data_type=self.shape.dtype,
        )
