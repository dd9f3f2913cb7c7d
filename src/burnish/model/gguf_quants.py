"""Numbers of GGUF's block formats as fp32.

The formats of one or two scales per block take few passes over the output, which torch shares among
threads; for the others the library's code is called on pieces that stay in the cache.
"""

import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

Type = GGMLQuantizationType

_UNPACKED = {Type.F32: torch.float32, Type.F16: torch.float16, Type.BF16: torch.bfloat16}
_PLAIN = (Type.Q4_0, Type.Q4_1, Type.Q8_0)
# Numbers that are written at once.
_WIDE_PIECE, _PIECE = 1 << 22, 1 << 17


def dequantise(raw: Tensor, kind: GGMLQuantizationType, out: Tensor) -> None:
    """Write numbers, rounded to the type of `out`.

    Args:
        raw: their bytes, uint8 [n * bytes of a block].
        kind: of the blocks.
        out: contiguous, as many numbers as the blocks have.
    """
    if kind in _UNPACKED:
        out.view(-1).copy_(raw.view(_UNPACKED[kind]))
        return
    block, block_bytes = GGML_QUANT_SIZES[kind]
    blocks, rows = raw.view(-1, block_bytes), out.view(-1, block)
    in_place = kind in _PLAIN and out.dtype == torch.float32
    step = max(1, (_WIDE_PIECE if in_place else _PIECE) // block)
    room = torch.empty(0 if in_place else step, block)
    for first in range(0, len(blocks), step):
        stored, numbers = blocks[first : first + step], rows[first : first + step]
        if in_place:
            _plain_blocks(stored, kind, numbers)
        elif kind in _PLAIN:
            wide = room[: len(stored)]
            _plain_blocks(stored, kind, wide)
            numbers.copy_(wide)
        else:
            numbers.copy_(torch.from_numpy(dequantize(stored.numpy(), kind)))


def _plain_blocks(raw: Tensor, kind: GGMLQuantizationType, out: Tensor) -> None:
    """Blocks of 32 numbers: fp16 scale, with Q4_1 fp16 offset, then bytes or halves of bytes."""
    if kind == Type.Q8_0:
        out.copy_(raw[:, 2:].view(torch.int8))
    else:
        # The low halves are the first 16 numbers.
        halves = raw[:, 4 if kind == Type.Q4_1 else 2 :]
        out[:, :16].copy_(halves & 15)
        out[:, 16:].copy_(halves >> 4)
        if kind == Type.Q4_0:
            out.sub_(8)
    out.mul_(_fp16(raw[:, :2]))
    if kind == Type.Q4_1:
        out.add_(_fp16(raw[:, 2:4]))


def _fp16(raw: Tensor) -> Tensor:
    return raw.contiguous().view(torch.float16).float()
