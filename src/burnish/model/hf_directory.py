"""A Hugging Face model directory: read its small files, write a whole one at once."""

import json
import os
import shutil
from pathlib import Path
from typing import Any, Literal

import torch

from burnish.core.errors import UserError, one_line
from burnish.model import safetensors_io
from burnish.model.chat import ChatRenderer
from burnish.model.config import ModelConfig, from_hf, to_hf
from burnish.model.decoder import Decoder
from burnish.model.tokenizer import Tokenizer

_FROM_REPOSITORY = "take the file from the model's own repository."
_ROLES = ("bos_token", "eos_token", "unk_token", "pad_token")
_KEPT_SETTINGS = ("tokenizer_class", "add_bos_token", "add_eos_token")
# Room for tokenizer and configuration files beside the weights.
_SMALL_FILES_BYTES = 16 * 2**20


def read_config(directory: Path) -> ModelConfig:
    """The architecture in `config.json`."""
    path = directory / "config.json"
    return from_hf(_read_json(path), source=str(path))


def read_tokenizer(directory: Path) -> tuple[Tokenizer, str | None]:
    """The tokenizer of `directory` and its chat template, if it has one.

    Raises:
        UserError: if a file is missing, damaged or of an unsupported kind.
    """
    path = directory / "tokenizer.json"
    document = _read_json(path)
    settings_path = directory / "tokenizer_config.json"
    settings = _read_json(settings_path) if settings_path.is_file() else {}
    named = {role: _content(settings[role]) for role in _ROLES if settings.get(role)}
    kept = {key: settings[key] for key in _KEPT_SETTINGS if key in settings}
    tokenizer = Tokenizer(document, source=str(path), named=named, settings=kept)
    separate = directory / "chat_template.jinja"
    if separate.is_file():
        return tokenizer, _read_text(separate)
    return tokenizer, _pick_template(settings.get("chat_template"))


def save(
    decoder: Decoder,
    tokenizer: Tokenizer,
    renderer: ChatRenderer,
    directory: Path,
    *,
    dtype: Literal["bfloat16", "float32"],
) -> None:
    """Write a directory that `transformers` loads; it appears complete or not at all.

    An earlier model directory of the same name is moved aside and then deleted: killed between two
    renames, it leaves no directory, but never half of one.

    Raises:
        UserError: if there is no space, or `directory` holds something else.
    """
    torch_dtype = torch.bfloat16 if dtype == "bfloat16" else torch.float32
    if directory.exists() and not _replaceable(directory):
        raise UserError(
            f"{directory}: exists and is not a model directory.",
            fix="give a new or empty directory.",
        )
    partial = directory.with_name(f".{directory.name}.partial")
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        needed = safetensors_io.num_bytes(decoder, torch_dtype) + _SMALL_FILES_BYTES
        free = shutil.disk_usage(directory.parent).free
        if free < needed:
            raise UserError(
                f"{directory}: needs {needed >> 20} MiB, {free >> 20} MiB are free.",
                fix="free some space or give another directory.",
            )
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        safetensors_io.save_weights(decoder, partial / safetensors_io.SINGLE_FILE, torch_dtype)
        tokenizer.save(partial / "tokenizer.json")
        for name, text in _small_files(decoder.config, tokenizer, renderer, dtype).items():
            (partial / name).write_text(text, encoding="utf-8")
        _swap(partial, directory)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise UserError(
            f"{directory}: cannot be written ({one_line(error)}).",
            fix="free some space, or give a directory that you may write to.",
        ) from error


def _small_files(
    config: ModelConfig, tokenizer: Tokenizer, renderer: ChatRenderer, dtype: str
) -> dict[str, str]:
    ids: dict[str, Any] = {
        "bos_token_id": tokenizer.token_id("bos_token"),
        "eos_token_id": tokenizer.token_id("eos_token"),
        "pad_token_id": tokenizer.token_id("pad_token"),
    }
    generation = ids | {"eos_token_id": list(renderer.stop_token_ids)}
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config.max_position_embeddings,
        "clean_up_tokenization_spaces": False,
        **tokenizer.settings,
        **{role: content for role, content in tokenizer.named.items() if role in _ROLES},
        "chat_template": renderer.template.text,
    }
    documents = {
        # Both spellings: transformers 5 reads `dtype`, transformers 4 `torch_dtype`.
        "config.json": to_hf(config) | ids | {"dtype": dtype, "torch_dtype": dtype},
        "generation_config.json": generation,
        "tokenizer_config.json": settings,
    }
    files = {name: json.dumps(value, indent=2) + "\n" for name, value in documents.items()}
    return files | {"README.md": _MODEL_CARD.format(family=config.family, dtype=dtype)}


def _replaceable(directory: Path) -> bool:
    if not directory.is_dir() or directory.is_symlink():
        return False
    return (directory / "config.json").is_file() or not any(directory.iterdir())


def _swap(partial: Path, directory: Path) -> None:
    """Flush `partial` and give it its name."""
    for path in [*partial.iterdir(), partial]:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    old = directory.with_name(f".{directory.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if directory.exists():
        directory.rename(old)
    partial.rename(directory)
    shutil.rmtree(old, ignore_errors=True)


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"{path}: cannot be read ({one_line(error)}).", fix=_FROM_REPOSITORY
        ) from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(_read_text(path))
    except (ValueError, RecursionError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(
            f"{path}: not valid JSON ({one_line(error)}).", fix=_FROM_REPOSITORY
        ) from error
    if not isinstance(document, dict):
        raise UserError(f"{path}: not a JSON object.", fix=_FROM_REPOSITORY)
    return document


def _content(token: Any) -> str:
    """Special tokens are written as text or as objects with a `content`."""
    return str(token["content"] if isinstance(token, dict) and "content" in token else token)


def _pick_template(stored: Any) -> str | None:
    """A template, or the one called "default" of a list of {name, template}."""
    if isinstance(stored, list):
        named = {t.get("name"): t.get("template") for t in stored if isinstance(t, dict)}
        stored = named.get("default")
    return stored if isinstance(stored, str) else None


_MODEL_CARD = """---
library_name: transformers
pipeline_tag: text-generation
tags:
- burnish
---

# Post-trained with Burnish

Architecture `{family}`, weights in {dtype}.

    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(".")
    tokenizer = AutoTokenizer.from_pretrained(".")
"""
