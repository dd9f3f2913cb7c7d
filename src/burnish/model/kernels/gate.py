"""The gated activation of the MLP.

Shapes: T rows, I inner width.
"""

import ctypes

import torch
from torch import Tensor
from torch.nn import functional as F

from burnish.model.kernels.library import function, handles, kernels

_P, _I = ctypes.c_void_p, ctypes.c_int64


def silu_mul(both_TI: Tensor) -> Tensor:
    """silu(gate) * up of rows [T, 2 I] that hold gate, then up; [T, I]."""
    if not handles(both_TI):
        return silu_mul_reference(both_TI)
    assert both_TI.dim() == 2
    assert both_TI.shape[1] % 2 == 0
    if both_TI.stride(1) != 1:
        both_TI = both_TI.contiguous()
    rows, width = both_TI.shape[0], both_TI.shape[1] // 2
    out = torch.empty((rows, width), dtype=both_TI.dtype)
    function("silu_mul", kernels().isa, _P, _P, _I, _I, _I, ctypes.c_int)(
        both_TI.data_ptr(),
        out.data_ptr(),
        rows,
        width,
        both_TI.stride(0),
        torch.get_num_threads(),
    )
    return out


def silu_mul_reference(both_TI: Tensor) -> Tensor:
    """The same by PyTorch's operators, in any dtype."""
    gate, up = both_TI.chunk(2, dim=-1)
    return F.silu(gate) * up
