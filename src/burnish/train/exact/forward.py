"""The decoder's blocks by the engine's kernels, with the trainer's gradients.

Shapes: T tokens, E hidden width, N targets, V vocabulary.
"""

import torch
from torch import Tensor

from burnish.model.decoder import Attend, Block, Decoder
from burnish.model.kernels.exact import refuse_inexact
from burnish.model.kernels.matrix import PackedMatrix
from burnish.train.exact.operators import exact_linear, exact_norm, exact_rotate, exact_silu_mul


class ExactForward:
    """Packed copies of a decoder's matrices, renewed when the decoder's change."""

    def __init__(self, decoder: Decoder) -> None:
        """Pack nothing yet.

        Raises:
            UserError: if this machine or model cannot be exact.
        """
        refuse_inexact(decoder.config, decoder.embedding.weight.dtype)
        self._decoder = decoder
        self._other: ExactForward | None = None
        self._packed: dict[int, tuple[int, PackedMatrix]] = {}

    def of(self, decoder: Decoder) -> "ExactForward":
        """That of another decoder, with its copies kept for the next call."""
        if self._other is None or self._other._decoder is not decoder:
            self._other = ExactForward(decoder)
        return self._other

    def block(
        self, block: Block, x_TE: Tensor, cos_TD: Tensor, sin_TD: Tensor, attend: Attend
    ) -> Tensor:
        """What `block` computes, [T, E]."""
        c, eps = block.config, block.config.rms_norm_eps
        normed = exact_norm(x_TE, block.attention_norm.weight, eps)
        heads = self._linear(block.qkv, normed)
        heads = heads.view(-1, c.num_heads + 2 * c.num_kv_heads, c.head_dim)
        q, k, v = heads.tensor_split((c.num_heads, c.num_heads + c.num_kv_heads), dim=1)
        if block.q_norm is not None and block.k_norm is not None:
            q = exact_norm(q, block.q_norm.weight, eps)
            k = exact_norm(k, block.k_norm.weight, eps)
        q, k = exact_rotate(q, cos_TD, sin_TD), exact_rotate(k, cos_TD, sin_TD)
        attended = attend(block.layer, q, k, v).reshape(-1, c.num_heads * c.head_dim)
        x_TE = x_TE + self._linear(block.output, attended)
        both = self._linear(block.gate_up, exact_norm(x_TE, block.mlp_norm.weight, eps))
        return x_TE + self._linear(block.down, exact_silu_mul(both))

    def norm(self, x_TE: Tensor) -> Tensor:
        """The final norm."""
        return exact_norm(x_TE, self._decoder.norm.weight, self._decoder.config.rms_norm_eps)

    def logits(self, hidden_NE: Tensor) -> Tensor:
        """Logits [N, V] in fp32, without gradient."""
        return self._matrix(self._decoder.head_weight(), None).linear_fp32(hidden_NE)

    def _linear(self, linear: torch.nn.Linear, x_TI: Tensor) -> Tensor:
        packed = self._matrix(linear.weight, linear.bias)
        return exact_linear(x_TI, linear.weight, linear.bias, packed)

    def _matrix(self, weight: Tensor, bias: Tensor | None) -> PackedMatrix:
        # The optimizer writes in place, which counts up the version.
        version = weight._version + (0 if bias is None else bias._version)
        known = self._packed.get(id(weight))
        if known is not None and known[0] == version:
            return known[1]
        if known is None:
            packed = PackedMatrix(weight, bias)
        else:
            packed = known[1]
            packed.fill(weight, bias)
        self._packed[id(weight)] = (version, packed)
        return packed
