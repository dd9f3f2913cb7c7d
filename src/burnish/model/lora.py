"""LoRA (Hu et al. 2021): a product of two thin matrices added to a weight, read from a PEFT folder.

    y = W x + scale * B (A x)        scale = alpha / r, or alpha / sqrt(r) (rsLoRA)

q, k, v and gate, up are fused here: their A matrices are stacked, their B matrices lie on a block
diagonal of one.

Shapes: R rank (of a fused matrix: the sum of its parts'), I inputs, O outputs, T rows.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from burnish.core.errors import UserError, one_line
from burnish.model.config import ModelConfig
from burnish.model.names import parts

_NAME = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<half>[AB])\.weight")
# What makes an adapter something else than two matrices beside a frozen weight.
_PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "use_dora": (None, False),
    "use_qalora": (None, False),
    "fan_in_fan_out": (None, False),
    "lora_bias": (None, False),
    "bias": (None, "none"),
    "modules_to_save": (None, []),
    "trainable_token_indices": (None, [], {}),
    "target_parameters": (None, []),
    "layer_replication": (None, []),
    "alora_invocation_tokens": (None, []),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
    "init_lora_weights": (None, True, False, "gaussian", "orthogonal"),
}


class LowRank(NamedTuple):
    """What is added to one of our fused matrices."""

    down_RI: Tensor
    """A, fp32."""
    up_OR: Tensor
    """B times the scale, fp32."""
    starts: tuple[int, ...] = (0,)
    """First output of each projection that it was fused from; their ranks are equal."""

    @property
    def rank(self) -> int:
        """Of each of these projections."""
        return len(self.down_RI) // len(self.starts)


class Delta(Protocol):
    """A `LowRank` ready to be applied."""

    def __call__(self, x_TI: Tensor) -> Tensor:
        """What is added to the rows' products, fp32 [T, O]."""
        ...


LayerDeltas = Mapping[str, Delta]
"""By the name of the matrix in a block: qkv, output, gate_up, down. Some may be missing."""


class AdaptedRows(NamedTuple):
    """Neighbouring rows of a flat batch that go through one adapter."""

    start: int
    """First row."""
    stop: int
    """One past the last."""
    layers: Sequence[LayerDeltas]
    """Of the adapter, one for each layer."""


class Lora(NamedTuple):
    """An adapter of a model."""

    layers: tuple[dict[str, LowRank], ...]
    """For each layer, by the name of the matrix in a block; what is not adapted is missing."""

    @property
    def rank(self) -> int:
        """Of its projections, the largest."""
        return max((each.rank for layer in self.layers for each in layer.values()), default=0)

    @property
    def is_zero(self) -> bool:
        """Whether it adds nothing, as before its training."""
        pairs = (each for layer in self.layers for each in layer.values())
        return not any(bool(each.up_OR.any()) and bool(each.down_RI.any()) for each in pairs)


class Projection(NamedTuple):
    """One that can be adapted, and the rows of our fused matrix that it fills."""

    layer: int
    """Number of its block."""
    own: str
    """Name of the fused matrix in the block."""
    start: int
    """First row that it fills."""
    outputs: int
    """Rows."""
    inputs: int
    """Columns."""


def load_lora(directory: Path, config: ModelConfig) -> Lora:
    """Read `adapter_config.json` and `adapter_model.safetensors`, as PEFT saves them.

    Raises:
        UserError: if it is not plain LoRA of this model, or cannot be read.
    """
    settings = _settings(directory)
    path = directory / "adapter_model.safetensors"
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"the adapter's weights {path} cannot be read ({one_line(error)}).",
            fix="save it with PEFT's save_pretrained, as safetensors.",
        ) from error
    return lora_from(tensors, settings, config)


def lora_from(
    tensors: Mapping[str, Tensor], settings: Mapping[str, Any], config: ModelConfig
) -> Lora:
    """An adapter from PEFT's tensors and the contents of its `adapter_config.json`.

    Raises:
        UserError: if it is not plain LoRA of this model.
    """
    rank, scale = _scale(settings)
    pieces = projections(config)
    halves: dict[tuple[str, str], Tensor] = {}
    for name, tensor in tensors.items():
        match = _NAME.fullmatch(name)
        if match is None or match["module"] not in pieces:
            raise UserError(
                f"the adapter has the tensor {name}, which is not LoRA of a projection here.",
                fix="train it on q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj.",
            )
        halves[match["module"], match["half"]] = tensor
    layers: list[dict[str, list[tuple[Projection, Tensor, Tensor]]]] = [
        {} for _ in range(config.num_layers)
    ]
    for module, piece in pieces.items():
        down, up = halves.get((module, "A")), halves.get((module, "B"))
        if down is None and up is None:
            continue
        if down is None or up is None:
            raise _refused(f"{module} has only one of its two matrices")
        _check(module, down, (rank, piece.inputs))
        _check(module, up, (piece.outputs, rank))
        found = layers[piece.layer].setdefault(piece.own, [])
        found.append((piece, down.float(), up.float() * scale))
    if not halves:
        raise _refused("it has no tensors")
    sizes = _sizes(pieces)
    return Lora(
        tuple({own: _fused(found, sizes[own]) for own, found in layer.items()} for layer in layers)
    )


def refuse_unfit(lora: Lora, config: ModelConfig) -> None:
    """Refuse an adapter that was not made for this model, or is not finite.

    Raises:
        UserError: naming the first matrix that does not fit.
    """
    pieces = projections(config)
    outputs, inputs = _sizes(pieces), {piece.own: piece.inputs for piece in pieces.values()}
    if len(lora.layers) != config.num_layers:
        raise _refused(f"it has {len(lora.layers)} layers, the model {config.num_layers}")
    for number, layer in enumerate(lora.layers):
        for own, (down_RI, up_OR, _) in layer.items():
            if own not in outputs:
                raise _refused(f"layer {number} has no matrix {own}")
            if not down_RI.dim() or not len(down_RI):
                raise _refused(f"{own} of layer {number} has rank 0")
            _check(f"{own} of layer {number}", down_RI, (len(down_RI), inputs[own]))
            _check(f"{own} of layer {number}", up_OR, (outputs[own], len(down_RI)))


def merged(state: Mapping[str, Tensor], lora: Lora) -> dict[str, Tensor]:
    """The weights with the adapter added: what a model without adapters computes the same with."""
    result = dict(state)
    for number, layer in enumerate(lora.layers):
        for own, (down_RI, up_OR, _) in layer.items():
            name = f"blocks.{number}.{own}.weight"
            weight = result[name]
            result[name] = (weight.float() + up_OR @ down_RI).to(weight.dtype)
    return result


def _settings(directory: Path) -> dict[str, Any]:
    path = directory / "adapter_config.json"
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(
            f"{path} cannot be read ({one_line(error)}).",
            fix="name the directory that PEFT's save_pretrained wrote.",
        ) from error
    if not isinstance(settings, dict):
        raise _refused("adapter_config.json is not an object")
    return settings


def _scale(settings: Mapping[str, Any]) -> tuple[int, float]:
    for key, plain in _PLAIN.items():
        if settings.get(key) not in plain:
            raise _refused(f"{key} is {settings.get(key)!r}")
    rank: Any = settings.get("r")
    alpha: Any = settings.get("lora_alpha")
    if type(rank) is not int or rank < 1:
        raise _refused(f"r is {rank!r}")
    if type(alpha) not in (int, float) or not math.isfinite(alpha):
        raise _refused(f"lora_alpha is {alpha!r}")
    return rank, float(alpha) / (math.sqrt(rank) if settings.get("use_rslora") else rank)


def projections(config: ModelConfig) -> dict[str, Projection]:
    """Those of all layers, by Hugging Face's names."""
    found = {}
    for part in parts(config):
        if not part.own.startswith("blocks.") or len(part.shape) != 2:
            continue
        _, layer, own, _ = part.own.split(".")
        module = part.hf.removesuffix(".weight")
        found[module] = Projection(int(layer), own, part.start, *part.shape)
    return found


def _sizes(pieces: Mapping[str, Projection]) -> dict[str, int]:
    """Outputs of each fused matrix."""
    sizes: dict[str, int] = {}
    for piece in pieces.values():
        sizes[piece.own] = max(sizes.get(piece.own, 0), piece.start + piece.outputs)
    return sizes


def _fused(found: Sequence[tuple[Projection, Tensor, Tensor]], outputs: int) -> LowRank:
    down_RI = torch.cat([down for _, down, _ in found])
    up_OR = torch.zeros(outputs, len(down_RI))
    first = 0
    for piece, down, up in found:
        up_OR[piece.start : piece.start + piece.outputs, first : first + len(down)] = up
        first += len(down)
    return LowRank(down_RI, up_OR, tuple(piece.start for piece, _, _ in found))


def _check(module: str, tensor: Tensor, shape: tuple[int, int]) -> None:
    if tuple(tensor.shape) != shape:
        raise _refused(f"{module} has a matrix {tuple(tensor.shape)} where {shape} fits")
    if not tensor.dtype.is_floating_point or not bool(torch.isfinite(tensor).all()):
        raise _refused(f"{module} has numbers that are not finite, or no floating-point type")


def _refused(why: str) -> UserError:
    return UserError(
        f"the adapter cannot be served: {why}.",
        fix="serve plain LoRA of this model, or merge the adapter into the weights first.",
    )
