"""One decoder for trainer and engine: a forward over a flat run of tokens.

Attention is supplied by the caller: the trainer's reads a packed batch, the engine's reads pages.
All else, and the weights, are shared, so their log-probs agree.

Shapes: T tokens in the flat batch, E hidden width, H query heads, K key/value heads, D head width,
V vocabulary, N selected tokens.
"""

from collections.abc import Callable
from typing import Protocol, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from burnish.model.config import ModelConfig
from burnish.model.rope import cosines_and_sines, inverse_frequencies


class Attend(Protocol):
    """Attention of one layer over whatever the caller has laid out."""

    def __call__(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        """Rotated queries and keys, values -> outputs [T, H, D]. Scale is D ** -0.5."""
        ...


class RMSNorm(nn.Module):
    """Root-mean-square norm, statistics in fp32 (Zhang and Sennrich 2019, eq. 4)."""

    def __init__(self, width: int, eps: float) -> None:
        """Weight of ones, [width]."""
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last axis."""
        x32 = x.float()
        normed = x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + self.eps)
        scaled: Tensor = self.weight.to(x.dtype) * normed.to(x.dtype)
        return scaled


class Block(nn.Module):
    """Pre-norm attention and gated MLP. q, k, v and gate, up are stored fused: one GEMM each."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        """Build layer number `layer`."""
        super().__init__()
        c = config
        self.layer, self.config = layer, config
        self.attention_norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.qkv = nn.Linear(
            c.hidden_size, (c.num_heads + 2 * c.num_kv_heads) * c.head_dim, bias=c.qkv_bias
        )
        self.output = nn.Linear(c.num_heads * c.head_dim, c.hidden_size, bias=c.o_bias)
        self.q_norm = RMSNorm(c.head_dim, c.rms_norm_eps) if c.qk_norm else None
        self.k_norm = RMSNorm(c.head_dim, c.rms_norm_eps) if c.qk_norm else None
        self.mlp_norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.gate_up = nn.Linear(c.hidden_size, 2 * c.intermediate_size, bias=c.mlp_bias)
        self.down = nn.Linear(c.intermediate_size, c.hidden_size, bias=c.mlp_bias)

    def forward(self, x_TE: Tensor, cos_TD: Tensor, sin_TD: Tensor, attend: Attend) -> Tensor:
        """One block; returns [T, E]."""
        c = self.config
        heads = self.qkv(self.attention_norm(x_TE)).view(
            -1, c.num_heads + 2 * c.num_kv_heads, c.head_dim
        )
        q, k, v = heads.split((c.num_heads, c.num_kv_heads, c.num_kv_heads), dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, cos_TD, sin_TD), rotate(k, cos_TD, sin_TD)
        x_TE = x_TE + self.output(attend(self.layer, q, k, v).reshape(-1, c.num_heads * c.head_dim))
        gate, up = self.gate_up(self.mlp_norm(x_TE)).chunk(2, dim=-1)
        mlp_TE: Tensor = self.down(F.silu(gate) * up)
        return x_TE + mlp_TE


class Decoder(nn.Module):
    """Embedding, blocks, final norm and language-model head."""

    inv_freq: Tensor

    def __init__(self, config: ModelConfig) -> None:
        """Parameters are uninitialised beyond torch's defaults; load weights into them."""
        super().__init__()
        self.config = config
        # Of unit variance like torch's default, which on "meta" would import 800 modules (1.2 s).
        initial = torch.empty(config.vocab_size, config.hidden_size).uniform_(-(3**0.5), 3**0.5)
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size, _weight=initial)
        self.blocks = nn.ModuleList(Block(config, i) for i in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = (
            None
            if config.tie_word_embeddings
            else nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        )
        self.register_buffer("inv_freq", inverse_frequencies(config), persistent=False)

    def forward(self, ids_T: Tensor, positions_T: Tensor, attend: Attend) -> Tensor:
        """Final hidden states [T, E], normed. `positions_T` are 0-based within each sequence."""
        x_TE = self.embedding(ids_T)
        cos_TD, sin_TD = self.rope(positions_T, x_TE.dtype)
        for block in self.blocks:
            x_TE = block(x_TE, cos_TD, sin_TD, attend)
        hidden: Tensor = self.norm(x_TE)
        return hidden

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Keep the frequencies in fp32: in bf16, `decoder.to(bfloat16)` would turn far tokens."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.inv_freq = inverse_frequencies(self.config).to(self.embedding.weight.device)
        return self

    def rope(self, positions_T: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and sines [T, D] for `rotate`, computed in fp32."""
        return cosines_and_sines(self.config, self.inv_freq, positions_T, dtype)

    def head_weight(self) -> Tensor:
        """The head's matrix [V, E]."""
        return self.embedding.weight if self.lm_head is None else self.lm_head.weight

    def logits(self, hidden_NE: Tensor) -> Tensor:
        """Logits [N, V], always in fp32: bf16 logits near 20 would be off by up to 0.06 nats."""
        return F.linear(hidden_NE.float(), self.head_weight().float())


def rotate(x_THD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    """Rotary embedding in the half-split layout of Hugging Face (Su et al. 2021, eq. 34)."""
    first, second = x_THD.chunk(2, dim=-1)
    return x_THD * cos_TD[:, None] + torch.cat((-second, first), dim=-1) * sin_TD[:, None]
