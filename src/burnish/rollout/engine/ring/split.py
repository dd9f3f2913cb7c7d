"""Who computes which part of a prompt. Pure.

A later token sees more keys. So the prompt is cut into twice as many pieces as there are workers,
and worker r takes piece r and the r-th from the end: all have the same work (zig-zag).
"""

from itertools import pairwise
from typing import NamedTuple

PIECE_UNIT = 16
"""Pieces end at multiples of this, the last one excepted: what the attention kernels count in."""


class Piece(NamedTuple):
    """Consecutive tokens."""

    start: int
    """Position of the first."""
    end: int
    """One past the last."""


def pieces_of(num_tokens: int, num_workers: int) -> list[tuple[Piece, Piece]]:
    """The two pieces of each worker, in order; some are empty if there are few tokens."""
    num_cuts = 2 * num_workers
    cuts = [num_tokens * i // num_cuts // PIECE_UNIT * PIECE_UNIT for i in range(num_cuts)]
    cuts.append(num_tokens)
    pieces = [Piece(start, end) for start, end in pairwise(cuts)]
    return [(pieces[rank], pieces[-1 - rank]) for rank in range(num_workers)]


def num_scores(pieces: tuple[Piece, Piece]) -> int:
    """Query-key pairs of a worker."""
    return sum((p.end * (p.end + 1) - p.start * (p.start + 1)) // 2 for p in pieces)


def positions_of(pieces: tuple[Piece, Piece]) -> list[int]:
    """Positions of a worker's tokens, in the order in which it holds them."""
    return [p for piece in pieces for p in range(piece.start, piece.end)]
