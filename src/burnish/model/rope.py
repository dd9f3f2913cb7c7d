"""Frequencies of the rotary embedding, in fp32 on the CPU, as transformers computes them.

Shapes: D head width, T tokens.
"""

import math

import torch
from torch import Tensor

from burnish.model.config import ModelConfig
from burnish.model.rope_scaling import DynamicRope, LinearRope, Llama3Rope, YarnRope


def inverse_frequencies(config: ModelConfig) -> Tensor:
    """Rotary frequencies [D / 2]: radians per position."""
    scaling = config.rope_scaling
    match scaling:
        case LinearRope():
            return _plain(config.rope_theta, config.head_dim) / scaling.factor
        case DynamicRope():
            return _plain(_grown_base(config, scaling), config.head_dim)
        case YarnRope():
            return _yarn(config, scaling)
        case Llama3Rope():
            return _llama3(_plain(config.rope_theta, config.head_dim), scaling)
        case None:
            return _plain(config.rope_theta, config.head_dim)


def magnitude(config: ModelConfig) -> float:
    """What cosines and sines are multiplied by."""
    scaling = config.rope_scaling
    return scaling.magnitude if isinstance(scaling, YarnRope) else 1.0


def _plain(base: float | Tensor, width: int) -> Tensor:
    # The explicit device holds under `with torch.device("meta")` too.
    steps = torch.arange(0, width, 2, dtype=torch.int64, device="cpu")
    return 1.0 / (base ** (steps.float() / width))


def _grown_base(config: ModelConfig, scaling: DynamicRope) -> float | Tensor:
    width, original = config.head_dim, scaling.original_max_position_embeddings
    if width == 2:
        # One frequency, of exponent 0: no base can change it.
        return config.rope_theta
    # In fp32 as transformers does it: at position 2,000 the rounding of a double shows in logits.
    context = torch.tensor(max(config.max_position_embeddings, original), device="cpu")
    grown = (scaling.factor * context / original) - (scaling.factor - 1)
    return config.rope_theta * grown ** (width / (width - 2))


def _yarn(config: ModelConfig, scaling: YarnRope) -> Tensor:
    width, base = config.head_dim, config.rope_theta

    def dimension_of(turns: float) -> float:
        """The dimension whose frequency turns that often in the training context."""
        original = scaling.original_max_position_embeddings
        return width * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = dimension_of(scaling.beta_fast), dimension_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    if low == high:
        high += 0.001
    steps = torch.arange(width // 2, dtype=torch.float32, device="cpu")
    interpolated = ((steps - low) / (high - low)).clamp(0, 1)
    kept = _plain(base, width)
    return kept / scaling.factor * interpolated + kept * (1 - interpolated)


def _llama3(inv_freq: Tensor, scaling: Llama3Rope) -> Tensor:
    original = scaling.original_max_position_embeddings
    wavelength = 2 * torch.pi / inv_freq
    low, high = original / scaling.low_freq_factor, original / scaling.high_freq_factor
    smooth = (original / wavelength - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    blended = (1 - smooth) * inv_freq / scaling.factor + smooth * inv_freq
    scaled = torch.where(wavelength > low, inv_freq / scaling.factor, inv_freq)
    between = (wavelength <= low) & (wavelength >= high)
    return torch.where(between, blended, scaled)


def cosines_and_sines(
    config: ModelConfig, inv_freq: Tensor, positions_T: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Cosines and sines [T, D] of every position, computed in fp32."""
    angles = torch.outer(positions_T.float(), inv_freq)
    angles = torch.cat((angles, angles), dim=-1)
    scale = magnitude(config)
    if scale != 1.0:
        return (angles.cos() * scale).to(dtype), (angles.sin() * scale).to(dtype)
    return angles.cos().to(dtype), angles.sin().to(dtype)
