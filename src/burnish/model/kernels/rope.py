"""Rotary embedding in the half-split layout of Hugging Face (Su et al. 2021, eq. 34).

Shapes: T tokens, H heads, D head width.
"""

import ctypes

import torch
from torch import Tensor

from burnish.model.kernels.library import function, handles, kernels

_P, _I = ctypes.c_void_p, ctypes.c_int64
_ARGUMENTS = (_P, _I, _I, _I, _I, _P, _P, ctypes.c_int)


def rotate(x_THD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    """Turn every head by the angles of its token; contiguous."""
    if not handles(x_THD, cos_TD, sin_TD):
        return rotate_reference(x_THD, cos_TD, sin_TD)
    rows, heads, width = x_THD.shape
    assert cos_TD.shape == sin_TD.shape == (rows, width)
    assert width % 2 == 0
    out = x_THD.clone(memory_format=torch.contiguous_format)
    cos_TD, sin_TD = cos_TD.contiguous(), sin_TD.contiguous()
    function("rotate", kernels().isa, *_ARGUMENTS)(
        out.data_ptr(),
        rows,
        heads * width,
        heads,
        width,
        cos_TD.data_ptr(),
        sin_TD.data_ptr(),
        torch.get_num_threads(),
    )
    return out


def rotate_reference(x_THD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    """The same by PyTorch's operators, in any dtype."""
    first, second = x_THD.chunk(2, dim=-1)
    return x_THD * cos_TD[:, None] + torch.cat((-second, first), dim=-1) * sin_TD[:, None]
