"""A weight packed for the native products, and the products themselves.

Shapes: T rows, I inputs, O outputs.
"""

import ctypes

import torch
from torch import Tensor
from torch.nn import functional as F

from burnish.model.kernels.gate import silu_mul_reference
from burnish.model.kernels.library import function, kernels
from burnish.model.kernels.memory import lazy_zeros

_P, _I, _C = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
_PANEL = 16
MOST_INPUTS = 128 << 10
"""Widest rows; ROOM of gemm_wide.h."""


class MatrixView(ctypes.Structure):
    """`struct matrix` of kernels.h."""

    _fields_ = (
        ("panels", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("inputs", ctypes.c_int64),
        ("outputs", ctypes.c_int64),
    )


class PackedMatrix:
    """A bf16 weight [O, I] in the layout of gemm.h, with an optional bias.

    With `gated` the rows are those of a gate, then as many that it scales, and O counts one half.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None, *, gated: bool = False) -> None:
        """Pack a copy of `weight`, bf16 or fp32 that is rounded; I is at most `MOST_INPUTS`."""
        self.outputs, self.inputs = weight.shape
        assert self.inputs <= MOST_INPUTS
        self.is_gated = gated
        if gated:
            assert self.outputs % 2 == 0
            self.outputs //= 2
        panels = -(-self.outputs // _PANEL) * (2 if gated else 1)
        count = panels * _PANEL * (self.inputs + self.inputs % 2)
        self._panels = lazy_zeros(count, dtype=torch.bfloat16)
        self._bias = None if bias is None else torch.empty_like(bias, dtype=torch.bfloat16)
        self.view = MatrixView(
            self._panels.data_ptr(),
            None if self._bias is None else self._bias.data_ptr(),
            self.inputs,
            self.outputs,
        )
        self.fill(weight, bias)

    def fill(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Replace the numbers, in place."""
        assert weight.shape == (self.outputs * (2 if self.is_gated else 1), self.inputs)
        assert weight.dtype in (torch.bfloat16, torch.float32)
        weight = weight.detach().contiguous()
        halves = weight.chunk(2) if self.is_gated else (weight,)
        library = kernels().library
        assert library is not None
        library.pack_panels.argtypes = (_P, _C, _I, _I, _P, _I, _I, _C)
        for first, half in enumerate(halves):
            library.pack_panels(
                half.data_ptr(),
                int(weight.dtype is torch.float32),
                self.outputs,
                self.inputs,
                self._panels.data_ptr(),
                first,
                len(halves),
                torch.get_num_threads(),
            )
        assert (bias is None) == (self._bias is None)
        if bias is not None and self._bias is not None:
            self._bias.copy_(bias.detach())

    def linear(self, x_TI: Tensor) -> Tensor:
        """Rows times the transposed weight, plus the bias, rounded to bf16 once; [T, O]."""
        assert not self.is_gated
        x_TI = self._rows(x_TI)
        out = torch.empty((len(x_TI), self.outputs), dtype=torch.bfloat16)
        function("linear", kernels().isa, _P, _I, _I, _P, _P, _I, _C, _C)(
            *self._operands(x_TI), out.data_ptr(), self.outputs, 0, torch.get_num_threads()
        )
        return out

    def linear_fp32(self, x_TI: Tensor, out: Tensor | None = None) -> Tensor:
        """The same in fp32, not rounded: products of bf16 numbers are exact in fp32.

        Args:
            x_TI: rows.
            out: where to write, fp32 [T, O] contiguous; None for new memory.
        """
        assert not self.is_gated
        x_TI = self._rows(x_TI)
        if out is None:
            out = torch.empty((len(x_TI), self.outputs), dtype=torch.float32)
        assert out.shape == (len(x_TI), self.outputs)
        assert out.dtype is torch.float32
        assert out.is_contiguous()
        function("linear_fp32", kernels().isa, _P, _I, _I, _P, _P, _I, _C)(
            *self._operands(x_TI), out.data_ptr(), self.outputs, torch.get_num_threads()
        )
        return out

    def gated(self, x_TI: Tensor) -> Tensor:
        """silu(gate) * up of the two halves' products, [T, O]."""
        assert self.is_gated
        x_TI = self._rows(x_TI)
        out = torch.empty((len(x_TI), self.outputs), dtype=torch.bfloat16)
        function("gated_linear", kernels().isa, _P, _I, _I, _P, _P, _I, _C)(
            *self._operands(x_TI), out.data_ptr(), self.outputs, torch.get_num_threads()
        )
        return out

    def gated_fp32(self, x_TI: Tensor) -> Tensor:
        """Products with the gate, then with what it scales, in fp32 and not joined; [T, 2 O]."""
        assert self.is_gated
        x_TI = self._rows(x_TI)
        panels = -(-self.outputs // _PANEL)
        view = MatrixView(self._panels.data_ptr(), None, self.inputs, 2 * panels * _PANEL)
        out = torch.empty((len(x_TI), view.outputs), dtype=torch.float32)
        function("linear_fp32", kernels().isa, _P, _I, _I, _P, _P, _I, _C)(
            x_TI.data_ptr(),
            len(x_TI),
            x_TI.stride(0),
            ctypes.addressof(view),
            out.data_ptr(),
            view.outputs,
            torch.get_num_threads(),
        )
        # Panels of the two alternate.
        halves = out.view(len(x_TI), panels, 2, _PANEL).transpose(1, 2).flatten(2)
        both = halves[:, :, : self.outputs].flatten(1)
        return both if self._bias is None else both + self._bias.float()

    def _rows(self, x_TI: Tensor) -> Tensor:
        assert x_TI.dtype is torch.bfloat16
        assert x_TI.dim() == 2
        assert x_TI.shape[1] == self.inputs
        if self.inputs % 2:
            return F.pad(x_TI, (0, 1))
        return x_TI if x_TI.stride(1) == 1 else x_TI.contiguous()

    def _operands(self, x_TI: Tensor) -> tuple[int, int, int, int]:
        return x_TI.data_ptr(), len(x_TI), x_TI.stride(0), ctypes.addressof(self.view)


def linear_reference(x_TI: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """What `PackedMatrix.linear` computes, by PyTorch in fp32."""
    bias32 = None if bias is None else bias.float()
    return F.linear(x_TI.float(), weight.float(), bias32).to(x_TI.dtype)


def gated_reference(x_TI: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """What `PackedMatrix.gated` computes, by PyTorch."""
    return silu_mul_reference(linear_reference(x_TI, weight, bias))


def all_finite(tensor: Tensor) -> bool:
    """Whether no number is NaN or infinite, also after rounding to bf16."""
    library = kernels().library
    assert library is not None
    assert tensor.dtype in (torch.bfloat16, torch.float32)
    tensor = tensor.detach().contiguous()
    library.all_finite.argtypes = (_P, _C, _I, _C)
    is_fp32 = int(tensor.dtype is torch.float32)
    threads = torch.get_num_threads()
    return bool(library.all_finite(tensor.data_ptr(), is_fp32, tensor.numel(), threads))
