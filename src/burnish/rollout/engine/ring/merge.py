"""Attention over a part of the keys, and putting parts together (online softmax).

With out_i and l_i = log sum exp of the scores over part i (Milakov and Gimelshein 2018):
l = log(e^l_1 + e^l_2), out = e^(l_1 - l) out_1 + e^(l_2 - l) out_2.

Shapes: T tokens, C keys, H query heads, K key/value heads, D head width.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Part(NamedTuple):
    """Attention over some of the keys."""

    out_HTD: Tensor
    """Normalised over those keys, fp32."""
    scale_HT: Tensor
    """Log of the summed exponentials of their scores, fp32."""


def attend_part(q_THD: Tensor, k_CKD: Tensor, v_CKD: Tensor, *, is_causal: bool) -> Part:
    """Attention over these keys; `is_causal` where they belong to the same tokens."""
    group = q_THD.shape[1] // k_CKD.shape[1]
    q, k, v = (
        x.transpose(0, 1)[None]
        for x in (q_THD, k_CKD.repeat_interleave(group, 1), v_CKD.repeat_interleave(group, 1))
    )
    # The public function returns no scale.
    out, scale = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, is_causal, scale=q_THD.shape[2] ** -0.5
    )
    return Part(out[0].float(), scale[0].float())


def merge(one: Part, other: Part) -> Part:
    """Attention over the keys of both."""
    scale_HT = torch.logaddexp(one.scale_HT, other.scale_HT)
    first, second = (
        (part.scale_HT - scale_HT).exp()[..., None] * part.out_HTD for part in (one, other)
    )
    return Part(first + second, scale_HT)
