"""Tokens and log-probs from fp32 logits.

Shapes: N rows, V vocabulary.
"""

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor

from burnish.model.kernels.library import function, kernels

_P, _I = ctypes.c_void_p, ctypes.c_int64
_ARGUMENTS = (_P, _I, _I, _I, _P, _P, _P, _P, _P, ctypes.c_int)


class Drawn(NamedTuple):
    """One token per row."""

    tokens_N: Tensor
    """int64; not set where the log-prob is NaN."""
    logprobs_N: Tensor
    """fp64, under the softmax of logits / temperature; NaN where the logits allow none."""


def can_draw(logits_NV: Tensor) -> bool:
    """Whether the kernels take these logits."""
    fits = logits_NV.dtype is torch.float32 and logits_NV.device.type == "cpu"
    return fits and kernels().library is not None


def draw(logits_NV: Tensor, temperatures_N: Tensor, uniforms_N: Tensor) -> Drawn:
    """Invert each row's cumulative distribution at its uniform.

    Args:
        logits_NV: of the next token.
        temperatures_N: above 0; of greedy rows that of the reported log-prob.
        uniforms_N: in [0, 1), or below 0 for the likeliest token, the first of equals.
    """
    uniforms_N = uniforms_N.to(torch.float64).contiguous()
    tokens_N = torch.zeros(len(logits_NV), dtype=torch.int64)
    logprobs_N = _run(logits_NV, temperatures_N, uniforms_N, None, tokens_N)
    return Drawn(tokens_N, logprobs_N)


def given_logprobs(logits_NV: Tensor, tokens_N: Tensor, temperatures_N: Tensor) -> Tensor:
    """Log-prob of a given token of each row, fp64: the bits that `draw` would report for it."""
    assert tokens_N.dtype is torch.int64
    return _run(logits_NV, temperatures_N, None, tokens_N.contiguous(), None)


def _run(
    logits_NV: Tensor,
    temperatures_N: Tensor,
    uniforms_N: Tensor | None,
    given_N: Tensor | None,
    tokens_N: Tensor | None,
) -> Tensor:
    assert can_draw(logits_NV)
    rows, width = logits_NV.shape
    if logits_NV.stride(1) != 1:
        logits_NV = logits_NV.contiguous()
    temperatures_N = temperatures_N.to(torch.float32).contiguous()
    assert len(temperatures_N) == rows
    logprobs_N = torch.empty(rows, dtype=torch.float64)
    failed = function("draw", kernels().isa, *_ARGUMENTS)(
        logits_NV.data_ptr(),
        rows,
        width,
        logits_NV.stride(0),
        temperatures_N.data_ptr(),
        None if uniforms_N is None else uniforms_N.data_ptr(),
        None if given_N is None else given_N.data_ptr(),
        None if tokens_N is None else tokens_N.data_ptr(),
        logprobs_N.data_ptr(),
        torch.get_num_threads(),
    )
    if failed:
        raise MemoryError("no memory for the sums of a row of logits")
    return logprobs_N
