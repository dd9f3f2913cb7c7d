"""How a rotary embedding is stretched to contexts longer than a model was trained on.

The keys are those of Hugging Face's `rope_parameters`, tagged by `rope_type`.
"""

import math
from typing import Any, Literal

import msgspec

from burnish.core.errors import UserError
from burnish.core.records import Record


class LinearRope(Record, frozen=True, kw_only=True, tag_field="rope_type", tag="linear"):
    """Position interpolation: every position is divided by `factor` (Chen et al. 2023)."""

    factor: float
    """How many times longer than in training."""

    def __post_init__(self) -> None:
        """Refuse what would shrink."""
        _check_factor(self.factor)


class DynamicRope(Record, frozen=True, kw_only=True, tag_field="rope_type", tag="dynamic"):
    """NTK-aware scaling: the base grows with the context, near frequencies hardly move.

    transformers picks the base by the length of the sequence so far. A key in a cache was rotated
    once and cannot follow, so the base here is always that of the longest context: the logits are
    those of transformers for a sequence of exactly that length.
    """

    factor: float
    """How many times longer than in training."""
    original_max_position_embeddings: int
    """Context of the training, tokens."""

    def __post_init__(self) -> None:
        """Refuse what would shrink or divide by zero."""
        _check_factor(self.factor)
        _check_original(self.original_max_position_embeddings)


class YarnRope(Record, frozen=True, kw_only=True, tag_field="rope_type", tag="yarn"):
    """YaRN (Peng et al. 2023): slow frequencies interpolated, fast ones kept, a ramp between."""

    factor: float
    """How many times longer than in training."""
    original_max_position_embeddings: int
    """Context of the training, tokens."""
    attention_factor: float | None = None
    """Scale of cosines and sines; None takes 0.1 ln(factor) + 1."""
    beta_fast: float = 32.0
    """Frequencies that turn more often than this in the training context are kept."""
    beta_slow: float = 1.0
    """Those that turn less often are interpolated."""
    mscale: float | None = None
    """With `mscale_all_dim`, a quotient of scales in the place of the default (DeepSeek)."""
    mscale_all_dim: float | None = None
    """See `mscale`."""
    truncate: bool = True
    """Whether the ramp begins and ends at whole dimensions."""

    def __post_init__(self) -> None:
        """Refuse what would shrink or divide by zero."""
        _check_factor(self.factor)
        _check_original(self.original_max_position_embeddings)
        if not 0 < self.beta_slow <= self.beta_fast < math.inf:
            raise ValueError("yarn needs 0 < beta_slow <= beta_fast")
        if self.attention_factor is not None and not 0 < self.attention_factor < math.inf:
            raise ValueError("attention_factor is not above 0")

    @property
    def magnitude(self) -> float:
        """Scale of cosines and sines."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return _magnitude(self.factor, self.mscale) / _magnitude(
                self.factor, self.mscale_all_dim
            )
        return _magnitude(self.factor, 1.0)


class Llama3Rope(Record, frozen=True, kw_only=True, tag_field="rope_type", tag="llama3"):
    """Llama-3 frequency scaling."""

    factor: float
    """Stretch of the low frequencies."""
    low_freq_factor: float
    """Wavelengths above `original / low` are stretched fully."""
    high_freq_factor: float
    """Wavelengths below `original / high` are left alone."""
    original_max_position_embeddings: int
    """Context length before stretching, tokens."""

    def __post_init__(self) -> None:
        """Refuse what would divide by zero."""
        if not (self.factor >= 1 and 0 < self.low_freq_factor < self.high_freq_factor):
            raise ValueError("rope scaling needs factor >= 1 and 0 < low < high frequency factor")
        _check_original(self.original_max_position_embeddings)


RopeKind = Literal["yarn", "linear", "dynamic"]
"""What a model can be stretched by after its training."""
RopeScaling = LinearRope | DynamicRope | YarnRope | Llama3Rope
_KINDS = {"linear": LinearRope, "dynamic": DynamicRope, "yarn": YarnRope, "llama3": Llama3Rope}


def read_scaling(rope: dict[str, Any], raw: dict[str, Any], source: str) -> dict[str, Any] | None:
    """The fields of a scaling out of a Hugging Face configuration, or None.

    Args:
        rope: its `rope_parameters`.
        raw: the whole, for the context length.
        source: where it came from, for messages.

    Raises:
        UserError: for a kind that is not implemented.
    """
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return None
    record = _KINDS.get(kind) if isinstance(kind, str) else None
    if record is None:
        raise UserError(
            f"{source}: rope_type {kind!r} is not implemented.",
            fix=f"use a model with one of default, {', '.join(_KINDS)}.",
        )
    names = record.__struct_fields__
    fields = {name: rope[name] for name in names if rope.get(name) is not None}
    context: Any = raw.get("max_position_embeddings")
    if kind == "dynamic":
        fields["original_max_position_embeddings"] = context
    elif kind == "yarn":
        original: Any = fields.get("original_max_position_embeddings")
        if "factor" not in fields and _is_count(context) and _is_count(original):
            fields["factor"] = context / original
        fields.setdefault("original_max_position_embeddings", context)
    return {"rope_type": kind, **fields}


def scaled_context(fields: dict[str, Any] | None, context: Any) -> Any:
    """Longest context: a dynamic scaling's configuration states the one before stretching."""
    if fields is None or fields["rope_type"] != "dynamic" or not _is_count(context):
        return context
    factor = fields.get("factor")
    return int(context * factor) if isinstance(factor, int | float) and factor > 0 else context


def write_scaling(scaling: RopeScaling | None) -> dict[str, Any]:
    """The fields for `rope_parameters`, the type included."""
    if scaling is None:
        return {"rope_type": "default"}
    fields: dict[str, Any] = msgspec.to_builtins(scaling)
    if isinstance(scaling, DynamicRope):
        # There the configuration's own context length says it.
        del fields["original_max_position_embeddings"]
    return {name: value for name, value in fields.items() if value is not None}


def _magnitude(factor: float, scale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def _check_factor(factor: float) -> None:
    if not 1 <= factor < math.inf:
        raise ValueError(f"rope scaling factor is {factor}, not at least 1")


def _check_original(original: int) -> None:
    if original < 1:
        raise ValueError("original_max_position_embeddings is not above 0")


def _is_count(value: Any) -> bool:
    return type(value) is int and value > 0
