"""Text to tokens and back, for byte-level BPE tokenizers.

User text is never markup: `encode` turns "<|im_end|>" into ordinary tokens unless the caller, who
then vouches for every character, says `allow_special=True`.
"""

import json
import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from burnish.core.errors import UserError, one_line


class Tokenizer:
    """A fast tokenizer and what the model's files say about its special tokens."""

    def __init__(
        self,
        document: dict[str, Any],
        *,
        source: str,
        named: dict[str, str],
        settings: dict[str, Any] | None = None,
    ) -> None:
        """Build from a decoded `tokenizer.json`.

        Args:
            document: the contents of `tokenizer.json`.
            source: file or directory that it came from, for messages.
            named: special tokens by role, such as {"eos_token": "<|im_end|>"}.
            settings: what `tokenizer_config.json` says beyond that, kept for export.

        Raises:
            UserError: if the tokenizer cannot be built, is not byte-level, or cannot keep user
                text apart from its special tokens.
        """
        self.source, self.named, self.settings = source, named, settings or {}
        # Set by whoever trained the tokenizer for their batches; here they would cut prompts.
        text = json.dumps(document | {"truncation": None, "padding": None}, ensure_ascii=False)
        if '"ByteLevel"' not in json.dumps(document.get("decoder")):
            raise UserError(
                f"{source}: the tokenizer is not byte-level BPE.",
                fix="use a model with one, such as SmolLM, Llama 3, Qwen or Mistral Nemo.",
            )
        self._plain = _build(text, source)
        self._plain.encode_special_tokens = True
        self.special_ids: dict[str, int] = {
            token["content"]: token["id"]
            for token in document.get("added_tokens") or ()
            if token["special"]
        }
        longest_first = sorted(self.special_ids, key=len, reverse=True)
        self.special_pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        """Matches every special token."""
        self._check_named()
        self._check_injection()

    @property
    def vocab_size(self) -> int:
        """Number of tokens; the model's embedding may have more rows."""
        return self._plain.get_vocab_size(with_added_tokens=True)

    @property
    def max_id(self) -> int:
        """The highest id that `encode` can give."""
        return max(self._plain.get_vocab(with_added_tokens=True).values())

    def encode(self, text: str, allow_special: bool = False) -> list[int]:
        """Token ids, nothing added. Special tokens in `text` are plain text unless allowed."""
        backend = self._marked if allow_special else self._plain
        # Lone surrogates have no bytes; output of a program may hold them.
        text = text.encode("utf-8", "replace").decode("utf-8")
        ids: list[int] = backend.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Sequence[int], skip_special: bool = False) -> str:
        """Text of `ids`; bytes that are not UTF-8 become U+FFFD."""
        return self._plain.decode(list(ids), skip_special_tokens=skip_special)

    def token_id(self, role: str) -> int | None:
        """Id of a named special token such as `eos_token`, if the model has it."""
        content = self.named.get(role)
        return None if content is None else self._plain.token_to_id(content)

    def save(self, path: Path) -> None:
        """Write `tokenizer.json`."""
        path.write_text(self._plain.to_str(pretty=True), encoding="utf-8")

    def to_json(self) -> str:
        """What `save` writes, for libraries that read a `tokenizer.json`."""
        return self._plain.to_str()

    @cached_property
    def _marked(self) -> Backend:
        """As `_plain`, but special tokens are markup. Built when needed: that takes long."""
        return _build(self._plain.to_str(), self.source)

    def _check_named(self) -> None:
        for role, content in self.named.items():
            if self._plain.token_to_id(content) is None:
                raise UserError(
                    f"{self.source}: {role} {content!r} is not in the vocabulary.",
                    fix="take the tokenizer files from the model's own repository.",
                )

    def _check_injection(self) -> None:
        forbidden = set(self.special_ids.values())
        for content in self.special_ids:
            if len(content) < 2 or forbidden.intersection(self.encode(content)):
                raise UserError(
                    f"{self.source}: text {content!r} cannot be told from the special token.",
                    fix="use a model whose special tokens are not ordinary words.",
                )


def _build(text: str, source: str) -> Backend:
    try:
        return Backend.from_str(text)
    except Exception as error:  # the library raises bare Exception for every kind of bad file
        raise UserError(
            f"{source}: the tokenizer cannot be built ({one_line(error)}).",
            fix="take the tokenizer files from the model's own repository.",
        ) from error
