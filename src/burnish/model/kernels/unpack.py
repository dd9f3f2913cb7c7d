"""Numbers of GGUF's blocks that have one or two scales."""

import ctypes

import torch
from gguf.constants import GGMLQuantizationType
from torch import Tensor

from burnish.model.kernels.library import kernels

_P, _I, _C = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
_BLOCK_BYTES = {
    GGMLQuantizationType.Q4_0: 18,
    GGMLQuantizationType.Q4_1: 20,
    GGMLQuantizationType.Q8_0: 34,
}


def can_unpack(kind: GGMLQuantizationType, dtype: torch.dtype) -> bool:
    """Whether `unpack_blocks` knows the kind and the type, and the library is there."""
    known = kind in _BLOCK_BYTES and dtype in (torch.float32, torch.bfloat16)
    return known and kernels().library is not None


def unpack_blocks(raw: Tensor, kind: GGMLQuantizationType, out: Tensor) -> None:
    """Write the numbers of whole blocks, rounded to the type of `out`.

    Args:
        raw: bytes of n blocks, uint8 [n * bytes of a block], contiguous.
        kind: one that `can_unpack` accepts.
        out: n * 32 numbers, fp32 or bf16, contiguous.
    """
    library = kernels().library
    assert library is not None
    num_blocks = raw.numel() // _BLOCK_BYTES[kind]
    assert raw.numel() == num_blocks * _BLOCK_BYTES[kind]
    assert out.numel() == num_blocks * 32
    assert raw.is_contiguous()
    assert out.is_contiguous()
    is_fp32 = int(out.dtype is torch.float32)
    library.unpack_blocks.argtypes = (_P, _C, _I, _P, _C, _C)
    library.unpack_blocks(
        *(raw.data_ptr(), int(kind), num_blocks, out.data_ptr()),
        *(is_fp32, torch.get_num_threads()),
    )
