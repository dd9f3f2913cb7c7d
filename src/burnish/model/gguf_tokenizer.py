"""Rebuilds a `tokenizer.json` from the metadata of a GGUF file."""

from enum import IntEnum
from typing import Any

import numpy as np

from burnish.core.errors import UserError
from burnish.model.gguf_file import GgufFile
from burnish.model.tokenizer import Tokenizer

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_REFETCH = "download the file again and compare its checksum."


class TokenType(IntEnum):
    """`tokenizer.ggml.token_type`."""

    NORMAL = 1
    """Made by merges."""
    UNKNOWN = 2
    """Stands for what cannot be encoded."""
    CONTROL = 3
    """Markup: never made from user text."""
    USER_DEFINED = 4
    """Added after training, but plain text."""
    UNUSED = 5
    """Fills the embedding up."""
    BYTE = 6
    """One raw byte."""


def read_tokenizer(file: GgufFile) -> Tokenizer:
    """The tokenizer that the metadata describe.

    Raises:
        UserError: if it is missing, damaged, not byte-level BPE or of an unknown pre-tokenizer.
    """
    meta, source = file.metadata, str(file.path)
    model, pre = meta.get("tokenizer.ggml.model"), meta.get("tokenizer.ggml.pre", "default")
    if model != "gpt2":
        raise UserError(
            f"{source}: tokenizer model {str(model)[:40]!r} is not implemented, only gpt2"
            " (byte-level BPE).",
            fix="use a model with one, such as SmolLM, Llama 3 or Qwen.",
        )
    if not isinstance(pre, str) or pre not in _PRE_TOKENIZERS:
        raise UserError(
            f"{source}: pre-tokenizer {str(pre)[:40]!r} is not implemented.",
            fix=f"use one of {', '.join(_PRE_TOKENIZERS)}, or the Hugging Face directory.",
        )
    tokens, types, merges = _columns(file)
    vocab = {
        token: i
        for i, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind != TokenType.UNUSED
    }
    if len(vocab) != len(tokens) - types.count(TokenType.UNUSED):
        raise UserError(f"{source}: a token occurs twice in the vocabulary.", fix=_REFETCH)
    document = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added(tokens, types),
        "normalizer": {"type": "NFC"} if pre == "qwen2" else None,
        "pre_tokenizer": _PRE_TOKENIZERS[pre],
        "post_processor": None,
        "decoder": _byte_level(True),
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": pre == "llama-bpe",
            "vocab": vocab,
            "merges": _merges(merges, vocab, source),
        },
    }
    settings = {"add_bos_token": bool(meta.get("tokenizer.ggml.add_bos_token", False))}
    return Tokenizer(document, source=source, named=_named(file, tokens), settings=settings)


def _columns(file: GgufFile) -> tuple[list[str], list[int], list[str]]:
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    merges = file.metadata.get("tokenizer.ggml.merges")
    types = file.metadata.get("tokenizer.ggml.token_type")
    if not isinstance(tokens, list) or not isinstance(merges, list):
        raise UserError(f"{file.path}: the tokenizer's tokens or merges are missing.", fix=_REFETCH)
    if types is None:
        return tokens, [TokenType.NORMAL.value] * len(tokens), merges
    kinds: Any = types.tolist() if isinstance(types, np.ndarray) else None
    if kinds is None or len(kinds) != len(tokens):
        raise UserError(f"{file.path}: tokens and token types differ in number.", fix=_REFETCH)
    return tokens, kinds, merges


def _merges(merges: list[str], vocab: dict[str, int], source: str) -> list[list[str]]:
    pairs = []
    for merge in merges:
        left, _, right = merge.partition(" ")
        if left not in vocab or right not in vocab or left + right not in vocab:
            raise UserError(f"{source}: merge {merge!r} is not of known tokens.", fix=_REFETCH)
        pairs.append([left, right])
    return pairs


def _added(tokens: list[str], types: list[int]) -> list[dict[str, Any]]:
    return [
        {
            "id": i,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind != TokenType.USER_DEFINED,
        }
        for i, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind in (TokenType.UNKNOWN, TokenType.CONTROL, TokenType.USER_DEFINED)
    ]


def _named(file: GgufFile, tokens: list[str]) -> dict[str, str]:
    roles = {"bos": "bos", "eos": "eos", "eot": "eot", "unknown": "unk", "padding": "pad"}
    named = {}
    for stored, role in roles.items():
        index = file.metadata.get(f"tokenizer.ggml.{stored}_token_id")
        if index is None:
            continue
        if type(index) is not int or not 0 <= index < len(tokens):
            raise UserError(f"{file.path}: {stored}_token_id is {index!r}.", fix=_REFETCH)
        named[f"{role}_token"] = tokens[index]
    return named


def _byte_level(use_regex: bool) -> dict[str, Any]:
    return {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": use_regex,
    }


def _split(pattern: str) -> dict[str, Any]:
    split = {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": False,
    }
    return {"type": "Sequence", "pretokenizers": [split, _byte_level(False)]}


_PRE_TOKENIZERS: dict[str, dict[str, Any]] = {
    "gpt-2": _byte_level(True),
    "smollm": {
        "type": "Sequence",
        "pretokenizers": [{"type": "Digits", "individual_digits": True}, _byte_level(True)],
    },
    "llama-bpe": _split(_LLAMA3),
    "qwen2": _split(_QWEN2),
}
