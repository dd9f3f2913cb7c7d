"""Which sequences share a forward pass: micro-batches under a token budget.

A pack is a set of prefix groups. The prompt that a group's sequences share is stored and computed
once per pack. Pure: sequences in, index lists out.
"""

from collections.abc import Sequence

from burnish.core.records import Record, TrainSequence


class PrefixGroup(Record, frozen=True, kw_only=True):
    """Sequences of one pack that share their first tokens."""

    num_prefix_tokens: int
    """Length of the shared prefix; 0 when nothing is shared."""
    members: tuple[int, ...]
    """Indices into the packed sequences."""


class Pack(Record, frozen=True, kw_only=True):
    """One micro-batch."""

    groups: tuple[PrefixGroup, ...]
    """In layout order: prefix, then each member's suffix."""
    num_tokens: int
    """Stored tokens, each shared prefix counted once."""


def pack(sequences: Sequence[TrainSequence], budget_tokens: int) -> tuple[Pack, ...]:
    """Distribute sequences over as few packs as first-fit decreasing finds.

    Every sequence lands in exactly one pack. No pack exceeds the budget, except one that holds a
    single sequence which is longer than the budget by itself.

    Args:
        sequences: any order; those of one prefix group are kept together where they fit.
        budget_tokens: most stored tokens per pack.
    """
    assert budget_tokens > 0
    pieces: list[tuple[int, PrefixGroup]] = []
    for members in _by_prefix(sequences):
        pieces.extend(_split(sequences, members, budget_tokens))
    # Stable order: size first, then first member, so equal inputs give equal packs.
    pieces.sort(key=lambda piece: (-piece[0], piece[1].members[0]))
    bins: list[tuple[int, list[PrefixGroup]]] = []
    for size, group in pieces:
        for i, (used, groups) in enumerate(bins):
            if used + size <= budget_tokens:
                groups.append(group)
                bins[i] = (used + size, groups)
                break
        else:
            bins.append((size, [group]))
    return tuple(Pack(groups=tuple(groups), num_tokens=used) for used, groups in bins)


def _by_prefix(sequences: Sequence[TrainSequence]) -> list[list[int]]:
    groups: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    for i, sequence in enumerate(sequences):
        prefix = sequence.token_ids[: sequence.num_prefix_tokens]
        key = (sequence.prefix_group, prefix) if prefix else (f"alone {i}", ())
        groups.setdefault(key, []).append(i)
    return list(groups.values())


def _split(
    sequences: Sequence[TrainSequence], members: Sequence[int], budget_tokens: int
) -> list[tuple[int, PrefixGroup]]:
    """Cut a group into pieces within the budget; each stores the prefix again."""
    prefix = sequences[members[0]].num_prefix_tokens
    pieces: list[tuple[int, list[int]]] = []
    for i in members:
        suffix = len(sequences[i].token_ids) - prefix
        for j, (used, part) in enumerate(pieces):
            if used + suffix <= budget_tokens:
                part.append(i)
                pieces[j] = (used + suffix, part)
                break
        else:
            pieces.append((prefix + suffix, [i]))
    return [
        (size, PrefixGroup(num_prefix_tokens=prefix, members=tuple(part))) for size, part in pieces
    ]
