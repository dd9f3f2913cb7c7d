"""Attention over a part of the keys, and putting parts together (online softmax).

With out_i and l_i = log sum exp of the scores over part i (Milakov and Gimelshein 2018):
l = log(e^l_1 + e^l_2), out = e^(l_1 - l) out_1 + e^(l_2 - l) out_2.

Shapes: T tokens, C keys, H query heads, K key/value heads, D head width.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from burnish.model.kernels.attention import (
    PagedLayer,
    PageKind,
    PageShape,
    SpanTable,
    attention_problem,
)
from burnish.rollout.engine.ring.split import PIECE_UNIT


class Part(NamedTuple):
    """Attention over some of the keys."""

    out_THD: Tensor
    """Normalised over those keys, fp32."""
    scale_TH: Tensor
    """Log of the summed exponentials of their scores, fp32."""


def attend_part(q_THD: Tensor, k_CKD: Tensor, v_CKD: Tensor, *, is_causal: bool) -> Part:
    """Attention over these keys; `is_causal` where they belong to the same tokens.

    Without causality the number of keys must be a multiple of `PIECE_UNIT`.
    """
    if attention_problem(q_THD.shape[2], PIECE_UNIT, q_THD.dtype) is None:
        return _attend_native(q_THD, k_CKD, v_CKD, is_causal=is_causal)
    group = q_THD.shape[1] // k_CKD.shape[1]
    q, k, v = (
        x.transpose(0, 1)[None]
        for x in (q_THD, k_CKD.repeat_interleave(group, 1), v_CKD.repeat_interleave(group, 1))
    )
    # The public function returns no scale.
    out, scale = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, is_causal, scale=q_THD.shape[2] ** -0.5
    )
    return Part(out[0].transpose(0, 1).float(), scale[0].T.float())


def _attend_native(q_THD: Tensor, k_CKD: Tensor, v_CKD: Tensor, *, is_causal: bool) -> Part:
    num_tokens, num_keys = len(q_THD), len(k_CKD)
    kind = PageKind.F32 if k_CKD.dtype is torch.float32 else PageKind.BF16
    num_pages = -(-num_keys // PIECE_UNIT)
    shape = PageShape(kind, PIECE_UNIT, k_CKD.shape[1], k_CKD.shape[2])
    layer = PagedLayer(shape, num_pages, with_tiles=True)
    layer.write(torch.arange(num_keys), k_CKD, v_CKD)
    pages = torch.arange(num_pages, dtype=torch.int32)
    start = 0
    if not is_causal:
        # The tokens come after all keys, over pages of their own that are not there.
        assert num_keys % PIECE_UNIT == 0
        start = num_keys
        missing = torch.full((-(-num_tokens // PIECE_UNIT),), -1, dtype=torch.int32)
        pages = torch.cat((pages, missing))
    table = SpanTable(torch.tensor([(0, num_tokens, start, 0, 0, 0)]), pages)
    scale_TH = torch.empty(q_THD.shape[:2])
    # Queries in fp32 have outputs in fp32, whatever the keys are in.
    out_THD = layer.attend(q_THD.float(), table, scale_TH)
    return Part(out_THD, scale_TH)


def merge(one: Part, other: Part) -> Part:
    """Attention over the keys of both."""
    scale_TH = torch.logaddexp(one.scale_TH, other.scale_TH)
    first, second = (
        (part.scale_TH - scale_TH).exp()[..., None] * part.out_THD for part in (one, other)
    )
    return Part(first + second, scale_TH)
