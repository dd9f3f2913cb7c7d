"""Seeds derived by name, so that no part's randomness depends on what ran before it."""

import hashlib


def derive_seed(root: int, *parts: str | int) -> int:
    """A 63-bit seed for the thing named by `parts` under `root`, the same everywhere."""
    text = "\x1f".join((str(root), *map(str, parts)))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
