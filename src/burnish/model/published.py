"""Weights as files for another program: Hugging Face's layout, with digests of what was written."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from burnish.model import safetensors_io
from burnish.model.config import ModelConfig, to_hf
from burnish.model.whole_folder import whole_folder


class Published(NamedTuple):
    """One version of the weights on disk."""

    folder: Path
    """Holds `model.safetensors` and `config.json`."""
    digest: str
    """SHA-256 over the bytes of all tensors in the order of their names."""
    vector_digests: Mapping[str, str]
    """SHA-256 of the bytes of every one-dimensional tensor: norms and biases."""


def publish(
    config: ModelConfig,
    state: Mapping[str, Tensor],
    folder: Path,
    dtype: Literal["bfloat16", "float32"],
) -> Published:
    """Write `state`, named as `Decoder.state_dict()`; the folder appears complete or not at all.

    Raises:
        UserError: the state does not fit the configuration, or the disk is full.
        OSError: the disk refuses otherwise.
    """
    torch_dtype = torch.bfloat16 if dtype == "bfloat16" else torch.float32
    stored = safetensors_io.stored_tensors(config, state, torch_dtype)
    num_bytes = sum(t.numel() * t.element_size() for t in stored.values())
    with whole_folder(folder, num_bytes) as partial:
        safetensors_io.save_tensors(stored, partial / safetensors_io.SINGLE_FILE)
        document = to_hf(config) | {"dtype": dtype, "torch_dtype": dtype}
        (partial / "config.json").write_text(json.dumps(document, indent=2) + "\n")
    digests = {name: _digest(tensor) for name, tensor in sorted(stored.items())}
    whole = hashlib.sha256("".join(digests.values()).encode()).hexdigest()
    vectors = {name: digests[name] for name, tensor in stored.items() if tensor.dim() == 1}
    return Published(folder, whole, vectors)


def _digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.view(-1).view(torch.uint8).numpy().data).hexdigest()
