"""Root-mean-square norm.

Shapes: T rows, E width.
"""

import ctypes

import torch
from torch import Tensor

from burnish.model.kernels.library import function, handles, kernels

_P, _I = ctypes.c_void_p, ctypes.c_int64
_ARGUMENTS = (_P, _P, _P, _I, _I, _I, ctypes.c_float, ctypes.c_int)


def rms_norm(x_TE: Tensor, weight_E: Tensor, eps: float) -> Tensor:
    """Norm of each row, statistics in fp32 (Zhang and Sennrich 2019, eq. 4); contiguous."""
    if not handles(x_TE, weight_E):
        return rms_norm_reference(x_TE, weight_E, eps)
    assert weight_E.shape == (x_TE.shape[-1],)
    if x_TE.dim() != 2 or x_TE.stride(-1) != 1:
        x_TE = x_TE.contiguous()
    width = x_TE.shape[-1]
    rows = x_TE.numel() // width
    stride = x_TE.stride(0) if x_TE.dim() == 2 else width
    out = torch.empty(x_TE.shape, dtype=x_TE.dtype)
    weight_E = weight_E.contiguous()
    threads = torch.get_num_threads()
    function("rms_norm", kernels().isa, *_ARGUMENTS)(
        x_TE.data_ptr(), weight_E.data_ptr(), out.data_ptr(), rows, width, stride, eps, threads
    )
    return out


def rms_norm_reference(x_TE: Tensor, weight_E: Tensor, eps: float) -> Tensor:
    """The same by PyTorch's operators, in any dtype."""
    x32 = x_TE.float()
    normed = x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + eps)
    scaled: Tensor = weight_E.to(x_TE.dtype) * normed.to(x_TE.dtype)
    return scaled
