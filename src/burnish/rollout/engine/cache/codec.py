"""One-byte numbers with a scale per token and head: the codes of attention_pages.h, by PyTorch.

Shapes: any leading axes, D head width last.
"""

import torch
from torch import Tensor

from burnish.core.vocabulary import KvDtype

_GREATEST = {KvDtype.INT8: 127.0, KvDtype.FP8: 448.0}


def quantize(x: Tensor, kv_dtype: KvDtype) -> tuple[Tensor, Tensor]:
    """Codes as uint8 [..., D] and scales as bf16 [...].

    The scale is rounded up to bf16 before it is used, so its rounding adds no error. A row that is
    not finite gets a NaN for a scale: it must be seen.
    """
    x = x.float()
    largest = x.abs().amax(-1)
    # Adding all lower bits but one carries into the kept ones: rounds up.
    bits = ((largest / _GREATEST[kv_dtype]).view(torch.int32) + 0xFFFF) >> 16
    scale = bits.to(torch.int16).view(torch.bfloat16)
    scale = torch.where(largest.isfinite(), scale, torch.nan)
    step = scale.float()[..., None]
    steps = torch.where(step > 0, x / step, 0.0)
    if kv_dtype is KvDtype.INT8:
        return steps.round().to(torch.int8).view(torch.uint8), scale
    return steps.to(torch.float8_e4m3fn).view(torch.uint8), scale


def restore(codes: Tensor, scale: Tensor, kv_dtype: KvDtype, dtype: torch.dtype) -> Tensor:
    """What `quantize` kept, [..., D]."""
    plain = torch.int8 if kv_dtype is KvDtype.INT8 else torch.float8_e4m3fn
    return (codes.view(plain).float() * scale.float()[..., None]).to(dtype)
