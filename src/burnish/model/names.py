"""The one table of weight names: our fused parameters, Hugging Face's tensors, GGUF's tensors."""

from collections.abc import Iterator
from typing import NamedTuple

from burnish.model.config import ModelConfig


class Part(NamedTuple):
    """One stored tensor and the rows of our parameter that it fills."""

    own: str
    """Name in `Decoder.state_dict()`."""
    start: int
    """First row of `own` that it fills."""
    hf: str
    """Name in a Hugging Face checkpoint."""
    gguf: str
    """Name in a GGUF file."""
    shape: tuple[int, ...]
    """Shape of the stored tensor; our rows have the same."""
    rotary_heads: int = 0
    """Heads whose rows the rotary embedding pairs up: GGUF stores those of Llama interleaved."""


class _Fused(NamedTuple):
    own: str
    pieces: tuple[tuple[str, str, int, int], ...]
    """(HF name, GGUF name, rows, rotary heads) in row order."""
    columns: int
    bias: bool


def parts(config: ModelConfig) -> Iterator[Part]:
    """Every stored tensor of a model, in the order of the forward pass."""
    c = config
    yield Part("embedding.weight", 0, "model.embed_tokens.weight", "token_embd.weight", _embed(c))
    for layer in range(c.num_layers):
        yield from _block(c, layer)
    yield Part("norm.weight", 0, "model.norm.weight", "output_norm.weight", (c.hidden_size,))
    if not c.tie_word_embeddings:
        yield Part("lm_head.weight", 0, "lm_head.weight", "output.weight", _embed(c))


def _embed(config: ModelConfig) -> tuple[int, int]:
    return (config.vocab_size, config.hidden_size)


def _block(c: ModelConfig, layer: int) -> Iterator[Part]:
    own, hf, gguf = f"blocks.{layer}", f"model.layers.{layer}", f"blk.{layer}"
    norms = [
        ("attention_norm", "input_layernorm", "attn_norm", c.hidden_size),
        ("mlp_norm", "post_attention_layernorm", "ffn_norm", c.hidden_size),
    ]
    if c.qk_norm:
        norms += [
            ("q_norm", "self_attn.q_norm", "attn_q_norm", c.head_dim),
            ("k_norm", "self_attn.k_norm", "attn_k_norm", c.head_dim),
        ]
    for ours, theirs, stored, width in norms:
        yield Part(
            f"{own}.{ours}.weight", 0, f"{hf}.{theirs}.weight", f"{gguf}.{stored}.weight", (width,)
        )
    for fused in _linears(c):
        start = 0
        for theirs, stored, rows, heads in fused.pieces:
            names = (f"{hf}.{theirs}", f"{gguf}.{stored}")
            for kind, shape in (("weight", (rows, fused.columns)), ("bias", (rows,))):
                if kind == "weight" or fused.bias:
                    yield Part(
                        f"{own}.{fused.own}.{kind}",
                        start,
                        f"{names[0]}.{kind}",
                        f"{names[1]}.{kind}",
                        shape,
                        heads,
                    )
            start += rows


def _linears(c: ModelConfig) -> tuple[_Fused, ...]:
    q, kv, wide = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim, c.intermediate_size
    return (
        _Fused(
            "qkv",
            (
                ("self_attn.q_proj", "attn_q", q, c.num_heads),
                ("self_attn.k_proj", "attn_k", kv, c.num_kv_heads),
                ("self_attn.v_proj", "attn_v", kv, 0),
            ),
            c.hidden_size,
            c.qkv_bias,
        ),
        _Fused("output", (("self_attn.o_proj", "attn_output", c.hidden_size, 0),), q, c.o_bias),
        _Fused(
            "gate_up",
            (("mlp.gate_proj", "ffn_gate", wide, 0), ("mlp.up_proj", "ffn_up", wide, 0)),
            c.hidden_size,
            c.mlp_bias,
        ),
        _Fused("down", (("mlp.down_proj", "ffn_down", c.hidden_size, 0),), wide, c.mlp_bias),
    )
