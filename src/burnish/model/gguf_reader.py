"""Reads a model out of a GGUF file: configuration, weights, tokenizer fields, chat template.

Nothing in the file is executed. Llama-family files hold the rows of q and k interleaved (llama.cpp
rotates neighbouring pairs); they are put back into the half-split order of Hugging Face.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from burnish.core.errors import UserError
from burnish.model.assembly import assemble
from burnish.model.config import ModelConfig, checked
from burnish.model.decoder import Decoder
from burnish.model.gguf_file import GgufFile
from burnish.model.names import Part, parts
from burnish.model.rope import inverse_frequencies
from burnish.model.rope_scaling import Llama3Rope

_FAMILIES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
_ROPE_FACTORS = "rope_freqs.weight"
# The only values that Llama 3.1 to 3.3 were published with; GGUF keeps just their product.
_LLAMA3_LOW, _LLAMA3_HIGH, _LLAMA3_ORIGINAL = 1.0, 4.0, 8192

# Refinements of YaRN that no published file of our families uses, with the value that means none.
_YARN_CHANGES = {"attn_factor": 1.0, "yarn_attn_factor": 1.0, "yarn_ext_factor": 1.0}


def read_config(file: GgufFile) -> ModelConfig:
    """The architecture that the metadata and the tensor table describe.

    Raises:
        UserError: for an architecture or a feature that is not implemented, or missing metadata.
    """
    meta, tensors = file.metadata, file.tensors
    arch = meta.get("general.architecture")
    if not isinstance(arch, str) or arch not in _FAMILIES:
        raise UserError(
            f"{file.path}: architecture {str(arch)[:40]!r} is not implemented.",
            fix=f"use one of {', '.join(_FAMILIES)} (Mistral files say llama).",
        )
    if "token_embd.weight" not in tensors or len(tensors["token_embd.weight"].shape) != 2:
        raise UserError(
            f"{file.path}: no token_embd.weight; this is not a language model.",
            fix="give the GGUF of a text model.",
        )
    window = meta.get(f"{arch}.attention.sliding_window") or None
    heads, hidden = _need(file, "attention.head_count"), _need(file, "embedding_length")
    head_dim = meta.get(f"{arch}.attention.key_length") or (
        hidden // heads if isinstance(heads, int) and isinstance(hidden, int) and heads else 0
    )
    config = checked(
        str(file.path),
        # Llama's own configuration has no window, so a windowed llama file came from Mistral.
        family="mistral" if arch == "llama" and window else _FAMILIES[arch],
        vocab_size=tensors["token_embd.weight"].shape[0],
        hidden_size=hidden,
        intermediate_size=_need(file, "feed_forward_length"),
        num_layers=_need(file, "block_count"),
        num_heads=heads,
        num_kv_heads=meta.get(f"{arch}.attention.head_count_kv", heads),
        head_dim=head_dim,
        max_position_embeddings=_need(file, "context_length"),
        rms_norm_eps=_short(_need(file, "attention.layer_norm_rms_epsilon")),
        rope_theta=_short(meta.get(f"{arch}.rope.freq_base", 10_000.0)),
        rope_scaling=_stored_scaling(file, head_dim, meta.get(f"{arch}.context_length")),
        tie_word_embeddings="output.weight" not in tensors,
        qkv_bias="blk.0.attn_q.bias" in tensors,
        o_bias="blk.0.attn_output.bias" in tensors,
        mlp_bias="blk.0.ffn_gate.bias" in tensors,
        qk_norm="blk.0.attn_q_norm.weight" in tensors,
        sliding_window=window,
    )
    if _ROPE_FACTORS in tensors:
        fields = {name: getattr(config, name) for name in ModelConfig.__struct_fields__}
        config = ModelConfig(**fields | {"rope_scaling": _rope_scaling(file, config)})
    return config


def load_decoder(
    file: GgufFile, config: ModelConfig, dtype: torch.dtype = torch.float32
) -> Decoder:
    """Weights in `dtype`.

    Raises:
        UserError: if a tensor is missing, of another shape than `config` says, or not expected.
    """
    _check_tensors(file, config)
    interleaved = file.metadata["general.architecture"] == "llama"

    def fill(part: Part, rows: Tensor) -> None:
        if interleaved and part.rotary_heads:
            rows.copy_(half_split(torch.from_numpy(file.read(part.gguf)), part.rotary_heads))
        else:
            file.read_into(part.gguf, rows)

    return assemble(config, fill, source=str(file.path), dtype=dtype)


def half_split(rows: Tensor, num_heads: int) -> Tensor:
    """Undo llama.cpp's order of rotary rows: (0, D/2, 1, D/2 + 1, ...) within each head."""
    width = rows.shape[0] // num_heads
    pairs = rows.reshape(num_heads, width // 2, 2, *rows.shape[1:])
    return pairs.transpose(1, 2).reshape(rows.shape)


def _check_tensors(file: GgufFile, config: ModelConfig) -> None:
    # Counted first: a hostile block_count would otherwise spend minutes on building names.
    if config.num_layers > len(file.tensors):
        raise UserError(
            f"{file.path}: {config.num_layers} layers but only {len(file.tensors)} tensors.",
            fix="download the file again and compare its checksum.",
        )
    expected = {part.gguf: part.shape for part in parts(config)}
    for name, shape in expected.items():
        info = file.tensors.get(name)
        if info is None or info.shape != shape:
            got = "missing" if info is None else f"of shape {list(info.shape)}"
            raise UserError(
                f"{file.path}: tensor {name!r} is {got}, expected shape {list(shape)}.",
                fix="use an unmodified GGUF of a supported architecture.",
            )
    extra = sorted(file.tensors.keys() - expected.keys() - {_ROPE_FACTORS})
    if extra:
        raise UserError(
            f"{file.path}: {len(extra)} tensors have no place in a {config.family} model,"
            f" such as {extra[0]!r}.",
            fix="use a plain text model without adapters or experts.",
        )


def _stored_scaling(file: GgufFile, head_dim: int, context: Any) -> dict[str, Any] | None:
    """The scaling that the metadata names, as fields of its record."""
    prefix = f"{file.metadata['general.architecture']}.rope"
    kind = file.metadata.get(f"{prefix}.scaling.type", "none")
    rotated = file.metadata.get(f"{prefix}.dimension_count", head_dim)
    changes = [
        key
        for key in _YARN_CHANGES
        if file.metadata.get(f"{prefix}.scaling.{key}", _YARN_CHANGES[key]) != _YARN_CHANGES[key]
    ]
    if kind not in ("none", "linear", "yarn") or rotated != head_dim or changes:
        raise UserError(
            f"{file.path}: rope scaling {kind!r} over {rotated} of {head_dim} dimensions"
            f"{' with ' + ', '.join(changes) if changes else ''} is not implemented.",
            fix="use a model with plain, linear, YaRN or Llama-3 rotary embedding.",
        )
    if kind == "none":
        return None
    fields: dict[str, Any] = {"rope_type": kind, "factor": _need(file, "rope.scaling.factor")}
    if kind == "yarn":
        original = file.metadata.get(f"{prefix}.scaling.original_context_length", context)
        fields["original_max_position_embeddings"] = original
        for name in ("beta_fast", "beta_slow"):
            stored = file.metadata.get(f"{prefix}.scaling.yarn_{name}")
            fields |= {} if stored is None else {name: _short(stored)}
    return fields | {"factor": _short(fields["factor"])}


def _rope_scaling(file: GgufFile, config: ModelConfig) -> Llama3Rope:
    """The Llama-3 parameters that give the stored divisors of the frequencies."""
    if file.tensors[_ROPE_FACTORS].shape == (config.head_dim // 2,):
        stored = file.read(_ROPE_FACTORS)
        scaling = Llama3Rope(
            factor=_short(float(stored.max())),
            low_freq_factor=_LLAMA3_LOW,
            high_freq_factor=_LLAMA3_HIGH,
            original_max_position_embeddings=_LLAMA3_ORIGINAL,
        )
        fields = {name: getattr(config, name) for name in ModelConfig.__struct_fields__}
        scaled = ModelConfig(**fields | {"rope_scaling": scaling})
        divisors = (inverse_frequencies(config) / inverse_frequencies(scaled)).numpy()
        if np.allclose(divisors, stored, rtol=1e-3):
            return scaling
    raise UserError(
        f"{file.path}: {_ROPE_FACTORS} does not hold the frequencies of Llama 3.1 to 3.3.",
        fix="use the model's Hugging Face directory instead.",
    )


def _need(file: GgufFile, key: str) -> Any:
    name = f"{file.metadata['general.architecture']}.{key}"
    if name not in file.metadata:
        raise UserError(
            f"{file.path}: metadata {name!r} is missing.",
            fix="use an unmodified GGUF of a supported architecture.",
        )
    return file.metadata[name]


def _short(value: Any) -> Any:
    """1e-05 instead of 9.999999747378752e-06: the shortest decimal of the stored float32."""
    return float(str(np.float32(value))) if isinstance(value, float) else value
