"""Operators whose forward is the engine's kernel and whose backward is that of PyTorch's operators.

The gradient is that of the mathematical function, taken at the inputs: rounding is not
differentiated, as it never is.

Shapes: T rows, I inputs, O outputs.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from burnish.model.kernels.gate import silu_mul, silu_mul_reference
from burnish.model.kernels.matrix import PackedMatrix
from burnish.model.kernels.norm import rms_norm, rms_norm_reference
from burnish.model.kernels.rope import rotate, rotate_reference


def exact_norm(x: Tensor, weight_E: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm of the last axis."""
    return _twin(
        lambda x, weight: rms_norm(x, weight, eps),
        lambda x, weight: rms_norm_reference(x, weight, eps),
        x,
        weight_E,
    )


def exact_rotate(x_THD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    """Rotary embedding."""
    return _twin(
        lambda x: rotate(x, cos_TD, sin_TD), lambda x: rotate_reference(x, cos_TD, sin_TD), x_THD
    )


def exact_silu_mul(both_TI: Tensor) -> Tensor:
    """silu(gate) * up."""
    return _twin(silu_mul, silu_mul_reference, both_TI)


def exact_linear(
    x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, packed: PackedMatrix
) -> Tensor:
    """Rows times the transposed weight, of which `packed` is the present copy."""
    out: Tensor = _Linear.apply(x_TI, weight_OI, bias_O, packed)  # type: ignore[no-untyped-call]
    return out


def _twin(
    native: Callable[..., Tensor], reference: Callable[..., Tensor], *inputs: Tensor
) -> Tensor:
    out: Tensor = _Twin.apply(native, reference, *inputs)  # type: ignore[no-untyped-call]
    return out


class _Twin(torch.autograd.Function):
    """Runs one function, differentiates the other: cheap element-wise ones are computed again."""

    @staticmethod
    def forward(
        ctx: Any,
        native: Callable[..., Tensor],
        reference: Callable[..., Tensor],
        *inputs: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(*inputs)
        ctx.reference = reference
        return native(*inputs)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        with torch.enable_grad():
            inputs = [x.detach().requires_grad_() for x in ctx.saved_tensors]
            grads = torch.autograd.grad(ctx.reference(*inputs), inputs, dout)
        return None, None, *grads


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, packed: PackedMatrix
    ) -> Tensor:
        ctx.save_for_backward(x_TI, weight_OI)
        ctx.has_bias = bias_O is not None
        return packed.linear(x_TI)

    @staticmethod
    def backward(ctx: Any, dout_TO: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None]:
        x_TI, weight_OI = ctx.saved_tensors
        dbias_O = dout_TO.sum(0) if ctx.has_bias else None
        return dout_TO @ weight_OI, dout_TO.mT @ x_TI, dbias_O, None
