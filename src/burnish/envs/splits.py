"""Which items belong to which split: decided by the content of the item itself.

A generator is one endless stream of items. Each split reads its own range of positions in that
stream, and keeps only items whose content hashes into its share. Different positions may hold the
same question (small generators repeat, and neighbouring seeds of some libraries are the same data
shifted by one), so ranges alone do not separate the splits; the hash does.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import TypeVar

from burnish.core.vocabulary import Split

T = TypeVar("T")

HELD_OUT_PERCENT = 25
"""Share of all distinct questions that only evaluation may see."""

TRIES = 256
"""Positions per index. A held-out index misses all of them with probability 0.75**256 = 1e-32."""

RANGE = 2**44
"""Positions per split; index < RANGE / TRIES = 2**36."""


def split_of(content: str) -> Split:
    """The split that owns this content, the same on every machine and in every version."""
    digest = hashlib.sha256(content.encode("utf-8", "surrogatepass")).digest()
    percent = int.from_bytes(digest[:8], "big") % 100
    return Split.HELD_OUT if percent < HELD_OUT_PERCENT else Split.TRAIN


def pick(split: Split, index: int, draw: Callable[[int], T], content: Callable[[T], str]) -> T:
    """The item at `index` of `split`: pure, and O(1) in the index.

    Args:
        split: pool to read from.
        index: position in the pool, 0 <= index < 2**36.
        draw: generator of the stream, position to item.
        content: what makes two items the same.

    Raises:
        ValueError: if the index is out of range.
        LookupError: if the generator holds (almost) nothing for this split.
    """
    if not 0 <= index < RANGE // TRIES:
        raise ValueError(f"task index must lie in [0, {RANGE // TRIES}), got {index}")
    start = (RANGE if split is Split.HELD_OUT else 0) + index * TRIES
    for position in range(start, start + TRIES):
        item = draw(position)
        if split_of(content(item)) is split:
            return item
    raise LookupError(
        f"no item for {split} near position {start}: the generator has too few distinct items"
    )
