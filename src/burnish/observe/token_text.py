"""Text of single tokens, from the `tokenizer.json` that lies beside an exported model.

Reports need no torch and no tokenizer library: a byte-level vocabulary is plain JSON.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from burnish.core.errors import UserError, one_line


class TokenText:
    """Looks up the bytes of byte-level BPE tokens."""

    def __init__(self, document: Mapping[str, object]) -> None:
        """Take a decoded `tokenizer.json`."""
        model = document.get("model")
        vocabulary = model.get("vocab") if isinstance(model, dict) else None
        if not isinstance(vocabulary, dict):
            vocabulary = {}
        self._bytes = {int(i): _to_bytes(str(token)) for token, i in vocabulary.items()}
        added = document.get("added_tokens")
        for token in added if isinstance(added, list) else ():
            self._bytes[int(token["id"])] = str(token["content"]).encode()

    def pieces(self, token_ids: Sequence[int]) -> list[str]:
        """Text of each token; a character split over tokens shows at the last of them."""
        texts: list[str] = []
        waiting = b""
        for token in token_ids:
            waiting += self._bytes.get(token, f"<{token}>".encode())
            try:
                text, waiting = waiting.decode(), b""
            except UnicodeDecodeError as error:
                # A character has at most 4 bytes: what is longer will never be whole.
                broken = len(waiting) - error.start >= 4
                text, waiting = (waiting.decode(errors="replace"), b"") if broken else ("", waiting)
            texts.append(text)
        if waiting:
            texts[-1] += waiting.decode(errors="replace")
        return texts


def find_token_text(run: Path) -> TokenText | None:
    """The tokenizer beside the exported model of a run; None before there is one.

    Raises:
        UserError: if it is damaged.
    """
    path = run / "model" / "tokenizer.json"
    if not path.exists():
        return None
    try:
        return TokenText(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, AttributeError, KeyError, TypeError, OSError) as error:
        what = f"{path}: damaged ({one_line(error)})."
        raise UserError(what, fix="restore it from a copy of the run.") from None


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for the 256 bytes (Radford et al. 2019, `bytes_to_unicode`)."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + n): b for n, b in enumerate(others)}


_ALPHABET = _byte_alphabet()


def _to_bytes(token: str) -> bytes:
    if all(char in _ALPHABET for char in token):
        return bytes(_ALPHABET[char] for char in token)
    return token.encode()
