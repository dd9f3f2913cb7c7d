"""Weights of a Hugging Face directory: safetensors in, safetensors out."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from burnish.core.errors import UserError, one_line
from burnish.model.assembly import assemble
from burnish.model.config import ModelConfig
from burnish.model.decoder import Decoder
from burnish.model.names import Part, parts

SINGLE_FILE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_DTYPES = ("F32", "F16", "BF16")
_REFETCH = "download the weights again and compare their checksums."
# Old checkpoints carry these buffers; the decoder computes them.
_DERIVED = (".rotary_emb.inv_freq",)


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files of `directory`: one, or the shards that its index names.

    Raises:
        UserError: if there are none, or a shard is missing.
    """
    single, index = directory / SINGLE_FILE, directory / _INDEX
    if single.is_file():
        return [single]
    if not index.is_file():
        raise UserError(
            f"{directory}: no {SINGLE_FILE} and no {_INDEX}.",
            fix="use a model with safetensors weights (pickled .bin files run code when loaded).",
        )
    names = _shard_names(index)
    missing = [name for name in names if not (directory / name).is_file()]
    if missing:
        raise UserError(
            f"{directory}: {len(missing)} of {len(names)} shards are missing, such as"
            f" {missing[0]!r}.",
            fix="download the missing files.",
        )
    return [directory / name for name in names]


def load_decoder(
    directory: Path, files: list[Path], config: ModelConfig, dtype: torch.dtype = torch.float32
) -> Decoder:
    """Weights in `dtype`.

    Raises:
        UserError: if a file is damaged, or names, shapes or types do not fit `config`.
    """
    try:
        where = _tensor_files(files)
        _check(directory, where, config)

        def fill(part: Part, rows: Tensor) -> None:
            with safe_open(where[part.hf], framework="pt") as file:
                rows.copy_(file.get_tensor(part.hf))

        return assemble(config, fill, source=str(directory), dtype=dtype)
    except SafetensorError as error:
        raise UserError(
            f"{directory}: damaged weights ({one_line(error)}).", fix=_REFETCH
        ) from error


def save_weights(decoder: Decoder, path: Path, dtype: torch.dtype) -> None:
    """Write the weights under their Hugging Face names.

    Raises:
        OSError: if the disk refuses.
    """
    save_tensors(stored_tensors(decoder.config, decoder.state_dict(), dtype), path)


def stored_tensors(
    config: ModelConfig, state: Mapping[str, Tensor], dtype: torch.dtype
) -> dict[str, Tensor]:
    """Copies in `dtype` under their Hugging Face names, on the CPU.

    Args:
        config: architecture.
        state: named as `Decoder.state_dict()`.
        dtype: of the copies.

    Raises:
        UserError: if a tensor is missing or has another shape.
    """
    stored = {}
    for part in parts(config):
        tensor = state.get(part.own)
        rows = None if tensor is None else tensor[part.start : part.start + part.shape[0]]
        if rows is None or tuple(rows.shape) != part.shape:
            found = "missing" if tensor is None else f"of shape {list(tensor.shape)}"
            raise UserError(
                f"weights: {part.own} is {found}, which does not hold {part.hf} "
                f"{list(part.shape)}.",
                fix="give the state of a decoder with the same configuration.",
            )
        stored[part.hf] = rows.detach().to("cpu", dtype, copy=True).contiguous()
    return stored


def save_tensors(stored: dict[str, Tensor], path: Path) -> None:
    """Write tensors as one safetensors file.

    Raises:
        OSError: if the disk refuses.
    """
    try:
        save_file(stored, path, metadata={"format": "pt"})
    except SafetensorError as error:
        # The library wraps what the operating system said into its own message.
        raise OSError(str(error)) from error


def num_bytes(decoder: Decoder, dtype: torch.dtype) -> int:
    """Size of the weights in `dtype`."""
    return sum(parameter.numel() for parameter in decoder.parameters()) * dtype.itemsize


def _shard_names(index: Path) -> list[str]:
    try:
        mapping = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        names = sorted(set(mapping.values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{index}: not a shard index ({one_line(error)}).", fix=_REFETCH) from error
    # A name with a path in it could reach outside the directory.
    if not names or any(not isinstance(n, str) or not n or Path(n).name != n for n in names):
        raise UserError(f"{index}: the shard names are not plain file names.", fix=_REFETCH)
    return names


def _tensor_files(files: list[Path]) -> dict[str, Path]:
    where: dict[str, Path] = {}
    for path in files:
        with safe_open(path, framework="pt") as file:
            where.update(dict.fromkeys(file.keys(), path))
    return where


def _check(directory: Path, where: dict[str, Path], config: ModelConfig) -> None:
    if config.num_layers > len(where):
        raise UserError(
            f"{directory}: {config.num_layers} layers but only {len(where)} tensors.",
            fix="take config.json and weights from the same model.",
        )
    expected = {part.hf: part.shape for part in parts(config)}
    for path in sorted(set(where.values())):
        with safe_open(path, framework="pt") as file:
            for name in sorted(n for n in file.keys() if n in expected):  # noqa: SIM118
                view: Any = file.get_slice(name)
                _check_tensor(f"{path}: tensor {name!r}", view, expected[name])
    missing = sorted(expected.keys() - where.keys())
    # A tied head may be stored all the same; transformers ignores it too.
    ignored = {"lm_head.weight"} if config.tie_word_embeddings else set()
    extra = sorted(
        name for name in where.keys() - expected.keys() - ignored if not name.endswith(_DERIVED)
    )
    for names, what in ((missing, "are missing"), (extra, f"have no place in {config.family}")):
        if names:
            raise UserError(
                f"{directory}: {len(names)} tensors {what}, such as {names[0]!r}.",
                fix="take config.json and weights from the same model.",
            )


def _check_tensor(what: str, view: Any, shape: tuple[int, ...]) -> None:
    if tuple(view.get_shape()) != shape:
        raise UserError(
            f"{what} has shape {view.get_shape()}, config.json asks for {list(shape)}.",
            fix="take config.json and weights from the same model.",
        )
    if view.get_dtype() not in _DTYPES:
        raise UserError(
            f"{what} has type {view.get_dtype()}, not one of {', '.join(_DTYPES)}.",
            fix="use the unquantised weights.",
        )
