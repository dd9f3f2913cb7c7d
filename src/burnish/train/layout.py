"""A pack as tensors: the flat run of tokens, its targets and its attention blocks.

Layout of T stored tokens, per prefix group: the prefix, then each member's suffix, whose positions
go on after the prefix. The hidden state of a prefix's last token predicts the first suffix token of
every member, so target rows may repeat.

Shapes: T stored tokens, N targets, M real tokens of a block, S segments padded to length L.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from burnish.core.records import TrainSequence
from burnish.train.packing import Pack

# Segments of one block are padded to the longest; a shorter one joins only if it fills this share
# of it or wastes at most _SLACK_TOKENS, so padding never dominates attention.
_FILL_RATIO = 0.6
_SLACK_TOKENS = 16


class Segment(NamedTuple):
    """A causal run of tokens in the flat layout."""

    start: int
    """First row."""
    length: int
    """Rows."""


class Block(NamedTuple):
    """Segments of similar length whose tokens all see one prefix (or none)."""

    prefix: Segment
    """Length 0 when there is none."""
    num_segments: int
    """S."""
    length: int
    """L, the longest segment."""
    rows_SL: Tensor
    """Flat row of each padded slot, [S * L]; padding repeats the segment's last row."""
    rows_M: Tensor
    """Flat rows of the real tokens."""
    slots_M: Tensor
    """Their slots, indices into S * L."""


class Layout(NamedTuple):
    """Everything the forward and the loss need about a pack."""

    ids_T: Tensor
    """Token ids."""
    positions_T: Tensor
    """0-based position within the sequence."""
    blocks: tuple[Block, ...]
    """Attention."""
    target_rows_N: Tensor
    """Row whose hidden state predicts the target."""
    target_ids_N: Tensor
    """The target."""
    behaviour_N: Tensor
    """Behaviour log-prob, fp32."""
    advantage_N: Tensor
    """Advantage, fp32."""
    sequence_N: Tensor
    """Index of the target's sequence in the step."""


def lay_out(sequences: Sequence[TrainSequence], pack: Pack) -> Layout:
    """Build the tensors of one pack."""
    ids: list[int] = []
    positions: list[int] = []
    targets: list[tuple[int, int, float, float, int]] = []
    heads: list[Segment] = []
    blocks: list[Block] = []
    for group in pack.groups:
        num_prefix = group.num_prefix_tokens
        prefix = Segment(len(ids), num_prefix)
        ids += sequences[group.members[0]].token_ids[:num_prefix]
        positions += range(num_prefix)
        tails: list[Segment] = []
        for i in group.members:
            sequence = sequences[i]
            tail = Segment(len(ids), len(sequence.token_ids) - num_prefix)
            ids += sequence.token_ids[num_prefix:]
            positions += range(num_prefix, len(sequence.token_ids))
            targets += _targets(sequence, i, prefix, tail)
            tails.append(tail)
        if num_prefix:
            heads.append(prefix)
            blocks += _blocks(prefix, tails)
        else:
            heads += tails
    assert len(ids) == pack.num_tokens
    blocks += _blocks(Segment(0, 0), heads)
    columns = list(zip(*targets, strict=True)) or [()] * 5
    rows, target_ids, behaviour, advantages, owners = columns
    return Layout(
        ids_T=torch.tensor(ids),
        positions_T=torch.tensor(positions),
        blocks=tuple(blocks),
        target_rows_N=torch.tensor(rows, dtype=torch.long),
        target_ids_N=torch.tensor(target_ids, dtype=torch.long),
        behaviour_N=torch.tensor(behaviour, dtype=torch.float32),
        advantage_N=torch.tensor(advantages, dtype=torch.float32),
        sequence_N=torch.tensor(owners, dtype=torch.long),
    )


def _targets(
    sequence: TrainSequence, index: int, prefix: Segment, tail: Segment
) -> Iterable[tuple[int, int, float, float, int]]:
    """(row, id, behaviour, advantage, sequence) of each target token."""
    assert not sequence.loss_mask[0], "the first token has nothing to be predicted from"
    for t, wanted in enumerate(sequence.loss_mask):
        if wanted:
            before = t - 1
            row = (
                prefix.start + before
                if before < prefix.length
                else tail.start + before - prefix.length
            )
            yield (row, sequence.token_ids[t], sequence.logprobs[t], sequence.advantages[t], index)


def _blocks(prefix: Segment, segments: Sequence[Segment]) -> list[Block]:
    """Bucket segments by length, longest first."""
    ordered = sorted((s for s in segments if s.length), key=lambda s: (-s.length, s.start))
    buckets: list[list[Segment]] = []
    for segment in ordered:
        longest = buckets[-1][0].length if buckets else 0
        least = min(_FILL_RATIO * longest, longest - _SLACK_TOKENS)
        if buckets and segment.length >= least:
            buckets[-1].append(segment)
        else:
            buckets.append([segment])
    return [_block(prefix, bucket) for bucket in buckets]


def _block(prefix: Segment, segments: Sequence[Segment]) -> Block:
    length = segments[0].length
    padded: list[int] = []
    rows: list[int] = []
    slots: list[int] = []
    for i, (start, n) in enumerate(segments):
        real = range(start, start + n)
        rows += real
        slots += range(i * length, i * length + n)
        padded += [*real, *([start + n - 1] * (length - n))]
    return Block(
        prefix=prefix,
        num_segments=len(segments),
        length=length,
        rows_SL=torch.tensor(padded),
        rows_M=torch.tensor(rows),
        slots_M=torch.tensor(slots),
    )
