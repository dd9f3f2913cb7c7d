"""Architecture of a decoder, read from a Hugging Face `config.json`."""

import math
from typing import Any, Literal

import msgspec

from burnish.core.errors import UserError
from burnish.core.records import Record
from burnish.model.rope_scaling import (
    DynamicRope,
    RopeScaling,
    read_scaling,
    scaled_context,
    write_scaling,
)

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
Family = Literal["llama", "mistral", "qwen2", "qwen3"]


# What transformers assumes for a key that an old or hand-written config.json leaves out.
_HF_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"rms_norm_eps": 1e-6, "max_position_embeddings": 2048},
    "mistral": {
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 131_072,
        "num_key_value_heads": 8,
        "sliding_window": 4096,
    },
    "qwen2": {
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 32_768,
        "num_key_value_heads": 32,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
    "qwen3": {
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 32_768,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
}
_COUNTS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "max_position_embeddings",
)


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
    """Tokens that a query sees back, itself included, in every layer (Mistral)."""

    def __post_init__(self) -> None:
        """Refuse what no forward pass can be built from."""
        for name in (*_COUNTS, "rms_norm_eps", "rope_theta"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} is {value}, not above 0")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"{self.num_heads} heads do not divide by {self.num_kv_heads} kv heads"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} is odd")
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ValueError(f"sliding_window is {self.sliding_window}, not above 0")


def from_hf(raw: dict[str, Any], *, source: str = "config.json") -> ModelConfig:
    """Read a Hugging Face configuration, of transformers 5 (`rope_parameters`) or older.

    Args:
        raw: the decoded `config.json`.
        source: where it came from, for messages.

    Raises:
        UserError: for a family or a feature that the decoder does not implement, or a missing or
            senseless value.
    """
    family = raw.get("model_type")
    if family not in FAMILIES:
        raise UserError(
            f"{source}: model_type {family!r} is not implemented.",
            fix=f"use a model of one of {', '.join(FAMILIES)}.",
        )
    raw = _HF_DEFAULTS[family] | raw
    if raw.get("hidden_act", "silu") != "silu":
        raise UserError(
            f"{source}: hidden_act {raw['hidden_act']!r} is not implemented.",
            fix="use a model with silu.",
        )
    required = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
    wrong = [
        key
        for key in (*required, "num_attention_heads")
        if type(raw.get(key)) is not int or raw[key] < 1
    ]
    if wrong:
        raise UserError(
            f"{source}: {', '.join(wrong)} missing or not a count.",
            fix="take config.json from the model's own repository.",
        )
    rope = _rope(raw, source)
    scaling = read_scaling(rope, raw, source)
    bias = family in ("llama", "qwen3") and (raw.get("attention_bias") or False)
    heads = raw["num_attention_heads"]
    return checked(
        source,
        family=family,
        vocab_size=raw["vocab_size"],
        hidden_size=raw["hidden_size"],
        intermediate_size=raw["intermediate_size"],
        num_layers=raw["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=raw.get("num_key_value_heads") or heads,
        head_dim=raw.get("head_dim") or raw["hidden_size"] // heads,
        max_position_embeddings=scaled_context(scaling, raw["max_position_embeddings"]),
        rms_norm_eps=raw["rms_norm_eps"],
        rope_theta=rope.get("rope_theta") or raw.get("rope_theta") or 10_000.0,
        rope_scaling=scaling,
        tie_word_embeddings=raw.get("tie_word_embeddings") or False,
        qkv_bias=family == "qwen2" or bias,
        o_bias=bias,
        mlp_bias=family == "llama" and (raw.get("mlp_bias") or False),
        qk_norm=family == "qwen3",
        sliding_window=_window(raw, source),
    )


def to_hf(config: ModelConfig) -> dict[str, Any]:
    """A `config.json` that transformers 4 and 5 both read, without token ids and dtype."""
    c = config
    scaling, rope = c.rope_scaling, write_scaling(c.rope_scaling)
    context = c.max_position_embeddings
    if isinstance(scaling, DynamicRope):
        context = scaling.original_max_position_embeddings
    raw: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[c.family]],
        "model_type": c.family,
        "vocab_size": c.vocab_size,
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "num_hidden_layers": c.num_layers,
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.num_kv_heads,
        "head_dim": c.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": context,
        "rms_norm_eps": c.rms_norm_eps,
        "rope_parameters": {**rope, "rope_theta": c.rope_theta},
        "rope_theta": c.rope_theta,
        "rope_scaling": None if scaling is None else rope,
        "tie_word_embeddings": c.tie_word_embeddings,
        "attention_dropout": 0.0,
        "use_cache": True,
    }
    if c.family in ("llama", "qwen3"):
        raw["attention_bias"] = c.qkv_bias
    if c.family == "llama":
        raw["mlp_bias"] = c.mlp_bias
    if c.family == "mistral":
        raw["sliding_window"] = c.sliding_window
    if c.family in ("qwen2", "qwen3"):
        raw["use_sliding_window"] = c.sliding_window is not None
        raw["sliding_window"] = c.sliding_window
        raw["max_window_layers"] = 0 if c.sliding_window is not None else c.num_layers
    return raw


def checked(source: str, **fields: Any) -> ModelConfig:
    """A ModelConfig whose types and ranges have been checked.

    Raises:
        UserError: naming `source` and the first field that is wrong.
    """
    try:
        config = msgspec.convert(fields, ModelConfig)
    except msgspec.ValidationError as error:
        raise UserError(
            f"{source}: {error}.", fix="take the file from the model's own repository again."
        ) from error
    if config.family == "llama" and config.qkv_bias != config.o_bias:
        raise UserError(
            f"{source}: biases on q, k, v but not on the attention output, or the reverse.",
            fix="use a model with biases on all four or on none.",
        )
    return config


_ARCHITECTURES: dict[str, str] = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


def _window(raw: dict[str, Any], source: str) -> int | None:
    """The window if all layers have it, None if none has."""
    family, window = raw["model_type"], raw.get("sliding_window")
    if family == "llama" or window is None:
        return None
    num_layers = raw["num_hidden_layers"]
    if family == "mistral":
        sliding = num_layers
    elif not raw.get("use_sliding_window", False):
        sliding = 0
    elif isinstance(raw.get("layer_types"), list):
        sliding = raw["layer_types"].count("sliding_attention")
    elif isinstance(raw["max_window_layers"], int):
        sliding = num_layers - min(num_layers, raw["max_window_layers"])
    else:
        sliding = -1
    if sliding not in (0, num_layers):
        raise UserError(
            f"{source}: only {sliding} of {num_layers} layers have a sliding window.",
            fix="use a model with the same attention in every layer.",
        )
    return window if sliding else None


def _rope(raw: dict[str, Any], source: str) -> dict[str, Any]:
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise UserError(
            f"{source}: rope_parameters is not an object.",
            fix="take config.json from the model's own repository.",
        )
    share = rope.get("partial_rotary_factor") or raw.get("partial_rotary_factor") or 1.0
    if share != 1.0:
        raise UserError(
            f"{source}: partial_rotary_factor {share} is not implemented.",
            fix="use a model that rotates whole heads.",
        )
    return rope
