"""Numbers of GGUF's formats as fp32 or bf16."""

import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from burnish.model.kernels.unpack import can_unpack, unpack_blocks

Type = GGMLQuantizationType

_UNPACKED = {Type.F32: torch.float32, Type.F16: torch.float16, Type.BF16: torch.bfloat16}
# Numbers that the library writes at once: its temporaries stay in the cache.
_PIECE = 1 << 17


def dequantise(raw: Tensor, kind: GGMLQuantizationType, out: Tensor) -> None:
    """Write numbers, rounded to the type of `out`.

    Args:
        raw: their bytes, uint8 [n * bytes of a block].
        kind: of the blocks.
        out: contiguous, as many numbers as the blocks have.
    """
    if kind in _UNPACKED:
        out.view(-1).copy_(raw.view(_UNPACKED[kind]))
    elif can_unpack(kind, out.dtype):
        unpack_blocks(raw, kind, out)
    else:
        block, block_bytes = GGML_QUANT_SIZES[kind]
        blocks, rows = raw.view(-1, block_bytes), out.view(-1, block)
        step = _PIECE // block
        for first in range(0, len(blocks), step):
            piece = blocks[first : first + step].reshape(-1).numpy()
            rows[first : first + step].view(-1).copy_(torch.from_numpy(dequantize(piece, kind)))
