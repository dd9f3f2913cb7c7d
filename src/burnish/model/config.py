"""Architecture of a decoder, read from a Hugging Face `config.json`."""

from typing import Any, Literal

from burnish.core.errors import UserError
from burnish.core.records import Record

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
Family = Literal["llama", "mistral", "qwen2", "qwen3"]


class RopeScaling(Record, frozen=True, kw_only=True):
    """Llama-3 frequency scaling (`rope_type = "llama3"`)."""

    factor: float
    """Stretch of the low frequencies."""
    low_freq_factor: float
    """Wavelengths above `original / low` are stretched fully."""
    high_freq_factor: float
    """Wavelengths below `original / high` are left alone."""
    original_max_position_embeddings: int
    """Context length before stretching, tokens."""


class ModelConfig(Record, frozen=True, kw_only=True):
    """Everything that fixes the forward pass."""

    family: Family
    """Hugging Face `model_type`."""
    vocab_size: int
    """Rows of the embedding."""
    hidden_size: int
    """Width E."""
    intermediate_size: int
    """Width of the gated MLP."""
    num_layers: int
    """Blocks."""
    num_heads: int
    """Query heads H."""
    num_kv_heads: int
    """Key/value heads K; H is a multiple of K."""
    head_dim: int
    """Width D of one head."""
    max_position_embeddings: int
    """Longest context, tokens."""
    rms_norm_eps: float
    """Epsilon of every RMSNorm."""
    rope_theta: float
    """Base of the rotary embedding."""
    rope_scaling: RopeScaling | None = None
    """Frequency scaling, if any."""
    tie_word_embeddings: bool = False
    """Whether the head is the embedding."""
    qkv_bias: bool = False
    """Bias on q, k, v (Qwen2; Llama's `attention_bias`)."""
    o_bias: bool = False
    """Bias on the output projection (Llama's `attention_bias`)."""
    mlp_bias: bool = False
    """Bias in the MLP (Llama's `mlp_bias`)."""
    qk_norm: bool = False
    """RMSNorm on q and k heads (Qwen3)."""
    sliding_window: int | None = None
    """Tokens that a query sees back, itself included (Mistral)."""


def from_hf(raw: dict[str, Any]) -> ModelConfig:
    """Read a Hugging Face configuration.

    Raises:
        UserError: for a family or a feature that the decoder does not implement.
    """
    family = raw.get("model_type")
    if family not in FAMILIES:
        raise UserError(
            f"model_type {family!r} is not implemented.", fix=f"use one of {', '.join(FAMILIES)}."
        )
    if raw.get("hidden_act", "silu") != "silu":
        raise UserError(
            f"hidden_act {raw['hidden_act']!r} is not implemented.", fix="use a model with silu."
        )
    rope = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    bias = bool(raw.get("attention_bias", False))
    heads = raw["num_attention_heads"]
    window = (
        raw.get("sliding_window") if raw.get("use_sliding_window", family == "mistral") else None
    )
    return ModelConfig(
        family=family,
        vocab_size=raw["vocab_size"],
        hidden_size=raw["hidden_size"],
        intermediate_size=raw["intermediate_size"],
        num_layers=raw["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=raw.get("num_key_value_heads") or heads,
        head_dim=raw.get("head_dim") or raw["hidden_size"] // heads,
        max_position_embeddings=raw["max_position_embeddings"],
        rms_norm_eps=raw["rms_norm_eps"],
        rope_theta=float(rope.get("rope_theta") or raw.get("rope_theta") or 10_000.0),
        rope_scaling=_rope_scaling(rope),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=True if family == "qwen2" else bias,
        o_bias=bias,
        mlp_bias=bool(raw.get("mlp_bias", False)),
        qk_norm=family == "qwen3",
        sliding_window=window,
    )


def _rope_scaling(rope: dict[str, Any]) -> RopeScaling | None:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return None
    if kind != "llama3":
        raise UserError(f"rope_type {kind!r} is not implemented.", fix='use "default" or "llama3".')
    return RopeScaling(
        factor=float(rope["factor"]),
        low_freq_factor=float(rope["low_freq_factor"]),
        high_freq_factor=float(rope["high_freq_factor"]),
        original_max_position_embeddings=int(rope["original_max_position_embeddings"]),
    )
