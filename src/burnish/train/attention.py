"""Attention over a packed layout, with a hand-written backward.

Keys and values of a shared prefix are never expanded: all queries of a block meet them in one GEMM
per key/value head, their own causal part in a batched one, and one softmax runs over both. Query
heads that share a key/value head are rows of the same GEMM, so nothing is repeated for GQA either.
Only queries, keys and values are kept for the backward; the probabilities are computed again.

Scores and softmax are in fp32: rounding a score near 20 to bf16 moves its probability by 6 %. The
other products run in the dtype of the model, which is twice as fast in bf16.

Shapes: T stored tokens, H query heads, K key/value heads, R = H / K, D head width, S segments
padded to L, C queries of a chunk per segment, P prefix tokens, J visible own tokens.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from burnish.train.layout import Block, Layout

# Bound on the fp32 scores that exist at once.
_SCORES_BYTES = 48 * 2**20
# A causal chunk sees no key after it, so shorter chunks skip work; below this GEMMs lose speed.
_CHUNK_QUERIES = 256


class PackedAttention:
    """The trainer's `Attend`: every segment sees its prefix and its own past."""

    def __init__(self, layout: Layout, sliding_window: int | None = None) -> None:
        """Attention over `layout`; a query sees `sliding_window` tokens back, itself included."""
        self._layout, self._window = layout, sliding_window

    def __call__(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        """Outputs [T, H, D]."""
        blocks, window = self._layout.blocks, self._window
        out: Tensor = _Packed.apply(q_THD, k_TKD, v_TKD, blocks, window)  # type: ignore[no-untyped-call]
        return out


class _Own(NamedTuple):
    """Tensors of one block: queries [K, S, R, L, D], own keys [K * S, L, D], prefix [K, P, D]."""

    q: Tensor
    k: Tensor
    v: Tensor
    k_prefix: Tensor
    v_prefix: Tensor


class _Packed(torch.autograd.Function):
    """Forward and backward over all blocks of a layout."""

    @staticmethod
    def forward(
        ctx: Any,
        q_THD: Tensor,
        k_TKD: Tensor,
        v_TKD: Tensor,
        blocks: tuple[Block, ...],
        window: int | None,
    ) -> Tensor:
        ctx.save_for_backward(q_THD, k_TKD, v_TKD)
        ctx.blocks, ctx.window = blocks, window
        out_THD = torch.empty_like(q_THD, memory_format=torch.contiguous_format)
        for block in blocks:
            own = _gather(block, q_THD, k_TKD, v_TKD)
            out = torch.empty_like(own.q)
            for start, end in _chunks(block, own.q):
                probs = _probabilities(block, own, start, end, window).to(own.v.dtype)
                out[:, :, :, start:end] = _mix(probs, own.v_prefix, own.v[:, :end])
            out_THD[block.rows_M] = _unpad(block, out)
        return out_THD

    @staticmethod
    def backward(ctx: Any, dout_THD: Tensor) -> tuple[Tensor | None, ...]:
        q_THD, k_TKD, v_TKD = ctx.saved_tensors
        backward = PackedBackward(q_THD, k_TKD, v_TKD, ctx.blocks, ctx.window)
        grads = backward.run(dout_THD)
        return *grads, None, None


class PackedBackward(NamedTuple):
    """The backward pass, whatever kernel computed the forward."""

    q_THD: Tensor
    """Queries."""
    k_TKD: Tensor
    """Keys."""
    v_TKD: Tensor
    """Values."""
    blocks: tuple[Block, ...]
    """Who sees whom."""
    window: int | None
    """Keys that a query sees back."""

    def run(self, dout_THD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of queries, keys and values."""
        q_THD, k_TKD, v_TKD, blocks, window = self
        dq_THD = torch.zeros_like(q_THD, memory_format=torch.contiguous_format)
        # Prefix keys collect from several blocks: sum in fp32.
        dk_TKD = torch.zeros(k_TKD.shape, dtype=torch.float32, device=k_TKD.device)
        dv_TKD = torch.zeros_like(dk_TKD)
        for block in blocks:
            own = _gather(block, q_THD, k_TKD, v_TKD)
            dout = _pad_zero(block, dout_THD, own.q.shape)
            grads = _block_backward(block, own, dout, window)
            dq_THD[block.rows_M] = _unpad(block, grads.q)
            dk_TKD[block.rows_M] += _unpad_keys(block, grads.k)
            dv_TKD[block.rows_M] += _unpad_keys(block, grads.v)
            rows = slice(block.prefix.start, block.prefix.start + block.prefix.length)
            dk_TKD[rows] += grads.k_prefix.transpose(0, 1)
            dv_TKD[rows] += grads.v_prefix.transpose(0, 1)
        return dq_THD, dk_TKD.to(k_TKD.dtype), dv_TKD.to(v_TKD.dtype)


def _block_backward(block: Block, own: _Own, dout: Tensor, window: int | None) -> _Own:
    """Gradients of one block; those of keys and values in fp32."""
    dtype, scale = own.q.dtype, own.q.shape[-1] ** -0.5
    grads = _Own(
        torch.empty_like(own.q),
        *(torch.zeros(t.shape, dtype=torch.float32, device=t.device) for t in own[1:]),
    )
    for start, end in _chunks(block, own.q):
        q, do = own.q[:, :, :, start:end], dout[:, :, :, start:end]
        k, v = own.k[:, :end], own.v[:, :end]
        probs = _probabilities(block, own, start, end, window)
        dprobs = torch.cat((_cross(do, own.v_prefix), _self(do, v)), dim=-1).float()
        weighted = dprobs.mul_(probs)
        dscores = weighted - probs * weighted.sum(-1, keepdim=True)
        ds, p = dscores.mul_(scale).to(dtype), probs.to(dtype)
        grads.q[:, :, :, start:end] = _mix(ds, own.k_prefix, k)
        for weights, rows, d_prefix, d_own in (
            (p, do, grads.v_prefix, grads.v),
            (ds, q, grads.k_prefix, grads.k),
        ):
            from_prefix, from_own = _collect(weights, rows, block.prefix.length)
            d_prefix += from_prefix
            d_own[:, :end] += from_own
    return grads


def _gather(block: Block, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> _Own:
    """The block's padded queries and keys, heads outermost."""
    num_kv, width = k_TKD.shape[1:]
    s, n = block.num_segments, block.length
    q = q_THD.index_select(0, block.rows_SL).view(s, n, num_kv, -1, width)
    k, v = (
        x.index_select(0, block.rows_SL)
        .view(s, n, num_kv, width)
        .permute(2, 0, 1, 3)
        .reshape(num_kv * s, n, width)
        for x in (k_TKD, v_TKD)
    )
    rows = slice(block.prefix.start, block.prefix.start + block.prefix.length)
    k_prefix, v_prefix = (x[rows].transpose(0, 1).contiguous() for x in (k_TKD, v_TKD))
    return _Own(q.permute(2, 0, 3, 1, 4).contiguous(), k, v, k_prefix, v_prefix)


def _chunks(block: Block, q: Tensor) -> Iterator[tuple[int, int]]:
    """Query ranges whose scores fit the bound."""
    num_kv, s, rep, n, _ = q.shape
    row_bytes = 4 * num_kv * s * rep * (block.prefix.length + n)
    size = max(1, min(_CHUNK_QUERIES, _SCORES_BYTES // row_bytes))
    for start in range(0, n, size):
        yield start, min(start + size, n)


def _probabilities(block: Block, own: _Own, start: int, end: int, window: int | None) -> Tensor:
    """Softmax over prefix and own past, fp32 [K, S, R, C, P + J]."""
    q = own.q[:, :, :, start:end].float() * own.q.shape[-1] ** -0.5
    scores = torch.cat((_cross(q, own.k_prefix.float()), _self(q, own.k[:, :end].float())), dim=-1)
    scores.masked_fill_(_hidden(block.prefix.length, start, end, window, q.device), -torch.inf)
    return torch.softmax(scores, dim=-1)


def _hidden(
    num_prefix: int, start: int, end: int, window: int | None, device: torch.device
) -> Tensor:
    """True where a query may not look, [C, P + J]."""
    query = torch.arange(num_prefix + start, num_prefix + end, device=device)[:, None]
    key = torch.arange(num_prefix + end, device=device)[None]
    hidden = key > query
    return hidden if window is None else hidden | (key <= query - window)


def _cross(rows: Tensor, prefix: Tensor) -> Tensor:
    """Product of rows [K, S, R, C, D] and prefix [K, P, D] -> [K, S, R, C, P]."""
    num_kv, s, rep, c, width = rows.shape
    product = torch.bmm(rows.reshape(num_kv, s * rep * c, width), prefix.mT)
    return product.view(num_kv, s, rep, c, -1)


def _self(rows: Tensor, keys: Tensor) -> Tensor:
    """Product of rows [K, S, R, C, D] and own keys [K * S, J, D] -> [K, S, R, C, J]."""
    num_kv, s, rep, c, width = rows.shape
    product = torch.bmm(rows.reshape(num_kv * s, rep * c, width), keys.mT)
    return product.view(num_kv, s, rep, c, -1)


def _mix(weights: Tensor, prefix: Tensor, own: Tensor) -> Tensor:
    """Product of weights [K, S, R, C, P + J] and (prefix, own) -> [K, S, R, C, D]."""
    num_prefix = prefix.shape[1]
    if not num_prefix:
        return _self(weights, own.mT)
    cross, past = weights[..., :num_prefix], weights[..., num_prefix:]
    return _cross(cross, prefix.mT) + _self(past, own.mT)


def _collect(weights: Tensor, rows: Tensor, num_prefix: int) -> tuple[Tensor, Tensor]:
    """Transposed product: [K, P, D] for the prefix and [K * S, J, D] for the own part."""
    num_kv, s, rep, c, width = rows.shape
    cross = weights[..., :num_prefix].reshape(num_kv, s * rep * c, num_prefix)
    past = weights[..., num_prefix:].reshape(num_kv * s, rep * c, -1)
    return (
        torch.bmm(cross.mT, rows.reshape(num_kv, s * rep * c, width)),
        torch.bmm(past.mT, rows.reshape(num_kv * s, rep * c, width)),
    )


def _unpad(block: Block, x: Tensor) -> Tensor:
    """[K, S, R, L, D] -> real rows [M, H, D]."""
    num_kv, s, rep, n, width = x.shape
    flat = x.permute(1, 3, 0, 2, 4).reshape(s * n, num_kv * rep, width)
    return flat.index_select(0, block.slots_M)


def _unpad_keys(block: Block, x: Tensor) -> Tensor:
    """[K * S, L, D] -> real rows [M, K, D]."""
    s, n, width = block.num_segments, block.length, x.shape[-1]
    flat = x.view(-1, s, n, width).permute(1, 2, 0, 3).reshape(s * n, -1, width)
    return flat.index_select(0, block.slots_M)


def _pad_zero(block: Block, x_THD: Tensor, shape: torch.Size) -> Tensor:
    """Real rows of [T, H, D] -> [K, S, R, L, D], zero in the padding."""
    num_kv, s, rep, n, width = shape
    flat = x_THD.new_zeros(s * n, num_kv * rep, width)
    flat[block.slots_M] = x_THD.index_select(0, block.rows_M)
    return flat.view(s, n, num_kv, rep, width).permute(2, 0, 3, 1, 4).contiguous()
