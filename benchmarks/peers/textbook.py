"""Decode attention over pages as it is written where nobody has a kernel for it.

All pages of a row are gathered, padded to the longest row, and go through one
`scaled_dot_product_attention`.
"""

from typing import Any

from torch import Tensor
from torch.nn import functional as F

from burnish.rollout.engine.cache.gathered import GatheredCache


def install() -> None:
    """Have the caches of this process attend so."""
    GatheredCache._attend_singles = _attend_singles


def _attend_singles(
    cache: GatheredCache, layer: int, bucket: Any, q_BHD: Tensor, out_THD: Tensor
) -> None:
    if bucket.rows is not None:
        q_BHD = q_BHD[bucket.rows]
    num_rows, _, width = q_BHD.shape
    num_kv, context = cache.shape.config.num_kv_heads, bucket.mask_BC.shape[1]
    both = cache._gather(layer, bucket.table).view(2, num_kv, num_rows, context, width)
    k_BKCD, v_BKCD = both.transpose(1, 2)
    out_BHD = F.scaled_dot_product_attention(
        q_BHD[:, :, None],
        *(k_BKCD, v_BKCD),
        attn_mask=bucket.mask_BC[:, None, None],
        enable_gqa=True,
    )[:, :, 0]
    if bucket.rows is None:
        out_THD[:num_rows] = out_BHD
    else:
        out_THD.index_copy_(0, bucket.rows, out_BHD)
