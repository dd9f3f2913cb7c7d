"""The two halves of a layer for rows that go through LoRA adapters, from the native products.

    begin    norm -> qkv + delta -> norms of heads -> rotation
    end      output + delta -> + x -> norm -> gate, up + delta -> gated -> down + delta -> + x

Products stay in fp32 until the delta is added, so each rounds to bf16 once. The delta's two
products take bf16 numbers like all others do: a row's bits depend on nothing but the row.

Shapes: T rows, E hidden width, R rank, I inputs, O outputs.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from burnish.model.config import ModelConfig
from burnish.model.kernels.gate import silu_mul
from burnish.model.kernels.matrix import PackedMatrix
from burnish.model.kernels.norm import rms_norm
from burnish.model.kernels.rope import rotate
from burnish.model.lora import AdaptedRows, LowRank


class PackedDelta:
    """A `LowRank` for the native products."""

    def __init__(self, low_rank: LowRank) -> None:
        """Pack copies, rounded to bf16; an odd rank gets a row of zeros."""
        pad = len(low_rank.down_RI) % 2
        down_RI = F.pad(low_rank.down_RI, (0, 0, 0, pad)).to(torch.bfloat16)
        self._down = PackedMatrix(down_RI)
        self._up = PackedMatrix(F.pad(low_rank.up_OR, (0, pad)).to(torch.bfloat16))

    def __call__(self, x_TI: Tensor) -> Tensor:
        """What is added to the rows' products, fp32 [T, O]."""
        return self._up.linear_fp32(self._down.linear(x_TI))


class Region(NamedTuple):
    """Neighbouring rows that are all plain, or all adapted."""

    start: int
    """First row."""
    stop: int
    """One past the last."""
    adapted: tuple[AdaptedRows, ...]
    """Adapters of its parts, in order and without gaps; empty if plain."""


class LayerParts(NamedTuple):
    """Weights of a layer."""

    matrices: Mapping[str, PackedMatrix]
    """qkv, output, gate_up, down."""
    norms: Mapping[str, Tensor]
    """Those that the model has."""


def regions(num_rows: int, adapted: Sequence[AdaptedRows]) -> list[Region]:
    """Split a flat batch; `adapted` ascend and do not overlap."""
    found: list[Region] = []
    end = 0
    for rows in adapted:
        if rows.start > end:
            found.append(Region(end, rows.start, ()))
        if found and found[-1].adapted and found[-1].stop == rows.start:
            last = found.pop()
            found.append(Region(last.start, rows.stop, (*last.adapted, rows)))
        else:
            found.append(Region(rows.start, rows.stop, (rows,)))
        end = rows.stop
    if end < num_rows:
        found.append(Region(end, num_rows, ()))
    return found


class AdaptedLayer:
    """One layer over the rows of one region."""

    def __init__(self, config: ModelConfig, parts: LayerParts, number: int, region: Region) -> None:
        """Of layer `number`."""
        self._config, self._parts = config, parts
        self._number, self._region = number, region

    def begin(self, x_TE: Tensor, cos_TD: Tensor, sin_TD: Tensor, qkv_T: Tensor) -> None:
        """Write the region's rotated queries and keys, and its values."""
        c, norms = self._config, self._parts.norms
        normed_TE = rms_norm(x_TE, norms["attention_norm"], c.rms_norm_eps)
        qkv = self._product("qkv", normed_TE).view(-1, c.num_heads + 2 * c.num_kv_heads, c.head_dim)
        q, k, v = qkv.tensor_split((c.num_heads, c.num_heads + c.num_kv_heads), dim=1)
        if "q_norm" in norms:
            q = rms_norm(q, norms["q_norm"], c.rms_norm_eps)
            k = rms_norm(k, norms["k_norm"], c.rms_norm_eps)
        turned = rotate(torch.cat((q, k), dim=1), cos_TD, sin_TD)
        qkv_T.copy_(torch.cat((turned, v), dim=1).view(len(x_TE), -1))

    def end(self, x_TE: Tensor, attended_T: Tensor) -> None:
        """Add attention and MLP to the region's rows, in place."""
        x_TE += self._product("output", attended_T)
        normed_TE = rms_norm(x_TE, self._parts.norms["mlp_norm"], self._config.rms_norm_eps)
        inner = silu_mul(self._product("gate_up", normed_TE))
        x_TE += self._product("down", inner)

    def _product(self, name: str, x_TI: Tensor) -> Tensor:
        matrix = self._parts.matrices[name]
        out = matrix.gated_fp32(x_TI) if matrix.is_gated else matrix.linear_fp32(x_TI)
        for start, stop, layers in self._region.adapted:
            delta = layers[self._number].get(name)
            if delta is not None:
                rows = slice(start - self._region.start, stop - self._region.start)
                out[rows] += delta(x_TI[rows])
        return out.to(torch.bfloat16)
