"""The decoder's attention where keys and values go round a ring of workers.

    own block -> compute own pieces   (each step: send what I hold on, receive the one before)
              -> block of rank - 1    -> ... -> block of rank + 1

Keys of later pieces are passed on but not computed. Shapes: T tokens, H query heads, K key/value
heads, D head width.
"""

from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from burnish.rollout.engine.ring.merge import Part, attend_part, merge
from burnish.rollout.engine.ring.split import Piece


class Ring:
    """Neighbours of this process."""

    def __init__(self, rank: int, num_workers: int, meeting: Path, timeout_s: float) -> None:
        """Meet the others through a file; who is not there within `timeout_s` is missed."""
        self.rank, self.num_workers = rank, num_workers
        timeout = timedelta(seconds=timeout_s)
        store = dist.FileStore(str(meeting), num_workers)  # type: ignore[attr-defined]
        store.set_timeout(timeout)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=num_workers, timeout=timeout
        )

    def shift(self, block: Tensor, into: Tensor) -> list[dist.Work]:
        """Begin to send a block to the next worker and to receive one from the previous."""
        following = (self.rank + 1) % self.num_workers
        previous = (self.rank - 1) % self.num_workers
        works = [dist.isend(_bytes(block), following), dist.irecv(_bytes(into), previous)]
        return [work for work in works if work is not None]

    def close(self) -> None:
        """Leave."""
        dist.destroy_process_group()


class RingAttend:
    """Attention of one prompt's part; keeps the keys and values of its own tokens."""

    def __init__(self, ring: Ring, pieces: list[tuple[Piece, Piece]], kept_LXTKD: Tensor) -> None:
        """Attend as the worker that `ring` belongs to.

        Args:
            ring: the neighbours.
            pieces: of every worker.
            kept_LXTKD: [layers, 2, own tokens, K, D], filled with keys and values.
        """
        self._ring, self._pieces, self._kept = ring, pieces, kept_LXTKD

    def __call__(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        """Attend in `layer`; returns [T, H, D]."""
        ring, own = self._ring, self._pieces[self._ring.rank]
        block = self._kept[layer]
        block[0], block[1] = k_TKD, v_TKD
        parts: list[Part | None] = [None, None]
        owner = ring.rank
        for turn in range(ring.num_workers):
            works, following = [], (owner - 1) % ring.num_workers
            if turn + 1 < ring.num_workers:
                size = sum(p.end - p.start for p in self._pieces[following])
                incoming = block.new_empty((2, size, *block.shape[2:]))
                works = ring.shift(block, incoming)
            parts = _add_block(parts, own, q_THD, self._pieces[owner], block)
            for work in works:
                work.wait()
            if works:
                block, owner = incoming, following
        outs = [part.out_THD for part in parts if part is not None]
        return torch.cat(outs).to(q_THD.dtype) if outs else torch.empty_like(q_THD)


def _add_block(
    parts: list[Part | None],
    own: tuple[Piece, Piece],
    q_THD: Tensor,
    theirs: tuple[Piece, Piece],
    block_XTKD: Tensor,
) -> list[Part | None]:
    """Attention of my pieces over their pieces, added to what there is."""
    done, first = list(parts), 0
    for i, piece in enumerate(own):
        count, begin = piece.end - piece.start, 0
        q = q_THD[first : first + count]
        first += count
        for other in theirs:
            keys = slice(begin, begin + other.end - other.start)
            begin = keys.stop
            if not count or keys.start == keys.stop or other.start > piece.start:
                continue
            k, v = block_XTKD[0, keys], block_XTKD[1, keys]
            part = attend_part(q, k, v, is_causal=other == piece)
            before = done[i]
            done[i] = part if before is None else merge(before, part)
    return done


def _bytes(block: Tensor) -> Tensor:
    return block.view(torch.uint8)
