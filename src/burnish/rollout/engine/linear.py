"""Matrix products for few rows: weights packed once into oneDNN's own layout.

Measured on Zen 4, one thread, bf16, 30 layers of 576 -> 3072: 1 row 12.6 -> 7.4 ms, 16 rows
19.4 -> 11.5 ms, 64 rows 43 -> 36.5 ms. fp32 576 -> 49152, 64 rows: 58 -> 35 ms. The operators are
private to torch, so they are tried once against `F.linear` and left alone if anything differs.
"""

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from burnish.model.lora import AdaptedRows, LowRank


class PackedLinear(nn.Module):
    """Drop-in for `nn.Linear` in inference. Holds the packed weight, or the plain one."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """Pack a copy of `weight` [out, in]; the arguments are not kept."""
        super().__init__()
        self.is_packed = weight.device.type == "cpu" and can_pack(weight.dtype)
        self.weight = _pack(weight) if self.is_packed else weight.detach().clone()
        self.bias = None if bias is None else bias.detach().clone()

    def forward(self, x_TI: Tensor) -> Tensor:
        """Rows times the transposed weight, plus the bias."""
        if self.is_packed:
            return _apply(x_TI, self.weight, self.bias)
        return F.linear(x_TI, self.weight, self.bias)


class AdapterScope:
    """Which rows of the present forward go through adapters; shared by all layers of a model."""

    def __init__(self) -> None:
        """None do."""
        self.rows: Sequence[AdaptedRows] = ()


class AdaptedLinear(nn.Module):
    """A matrix of a block, and what adapters add to some rows of its product."""

    def __init__(self, base: PackedLinear, layer: int, name: str, scope: AdapterScope) -> None:
        """`name` is that of the matrix in block number `layer`."""
        super().__init__()
        self.base, self._layer, self._name, self._scope = base, layer, name, scope

    def forward(self, x_TI: Tensor) -> Tensor:
        """Rows times the transposed weight, plus bias and deltas."""
        out: Tensor = self.base(x_TI)
        for start, stop, layers in self._scope.rows:
            delta = layers[self._layer].get(self._name)
            if delta is not None:
                # The sum is rounded once more than in a merged weight, never the delta alone.
                rows = out[start:stop]
                rows.copy_(rows.float() + delta(x_TI[start:stop]))
        return out


class PlainDelta:
    """A `LowRank` for torch's products, in fp32."""

    def __init__(self, low_rank: LowRank, device: torch.device) -> None:
        """Keep copies, on `device`."""
        self._down_IR = low_rank.down_RI.to(device, copy=True).T
        self._up_RO = low_rank.up_OR.to(device, copy=True).T

    def __call__(self, x_TI: Tensor) -> Tensor:
        """What is added to the rows' products, fp32 [T, O]."""
        return x_TI.float() @ self._down_IR @ self._up_RO


def _pack(weight: Tensor) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), 64)
    return packed


def _apply(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    y: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return y


@cache
def can_pack(dtype: torch.dtype) -> bool:
    """Whether packing works here and gives the right product; tried once per type."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(96, 64, generator=generator).to(dtype)
    bias = torch.randn(96, generator=generator).to(dtype)
    tolerance = 0.05 if dtype == torch.bfloat16 else 1e-4
    try:
        with torch.inference_mode():
            packed = _pack(weight)
            for rows in (1, 5, 40):
                x = torch.randn(rows, 64, generator=generator).to(dtype)
                torch.testing.assert_close(
                    _apply(x, packed, bias),
                    F.linear(x, weight, bias),
                    atol=tolerance,
                    rtol=tolerance,
                )
    except (RuntimeError, AttributeError, NotImplementedError, AssertionError):
        return False
    return True
