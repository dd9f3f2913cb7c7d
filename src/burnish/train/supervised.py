"""Supervised examples as training sequences, with what they share computed once.

Chats of one model open alike: the system prompt, the description of the tools, the words of a
domain's question. Examples with an equal opening become one prefix group, as samples of one prompt
do in reinforcement learning.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from burnish.core.records import TrainSequence

# Lengths of openings that are looked for, longest first. Shorter ones save less than they cost.
_OPENINGS = (96, 64, 48, 32, 24, 16)


class SftExample(NamedTuple):
    """A supervised example."""

    token_ids: Sequence[int]
    """Length L."""
    loss_mask: Sequence[bool]
    """True where the token is learned, length L."""


def supervised_sequences(examples: Sequence[SftExample]) -> list[TrainSequence]:
    """One sequence per example, in order; token 0 is never a target."""
    prefixes: dict[int, tuple[str, int]] = {}
    for group in _alike(examples):
        length = min(_first_target(examples[i]) for i in group)
        first = examples[group[0]].token_ids
        for i in group[1:]:
            ids = examples[i].token_ids
            length = next((t for t in range(length) if ids[t] != first[t]), length)
        prefixes |= dict.fromkeys(group, (f"supervised {group[0]}", length))
    return [
        _sequence(example, *prefixes.get(i, (f"supervised {i}", 0)))
        for i, example in enumerate(examples)
    ]


def _alike(examples: Sequence[SftExample]) -> list[list[int]]:
    """Groups of at least two examples that open alike; nobody is in two."""
    left = list(range(len(examples)))
    found: list[list[int]] = []
    for length in _OPENINGS:
        buckets: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for i in left:
            if _first_target(examples[i]) >= length:
                buckets[tuple(examples[i].token_ids[:length])].append(i)
        groups = [members for members in buckets.values() if len(members) > 1]
        found += groups
        taken = {i for group in groups for i in group}
        left = [i for i in left if i not in taken]
    return found


def _first_target(example: SftExample) -> int:
    """Index of the first learned token; what lies before it can be shared."""
    mask = example.loss_mask
    return next((i for i in range(1, len(mask)) if mask[i]), 0)


def _sequence(example: SftExample, group: str, num_prefix_tokens: int) -> TrainSequence:
    length = len(example.token_ids)
    mask = tuple(bool(m) and i > 0 for i, m in enumerate(example.loss_mask))
    return TrainSequence(
        token_ids=tuple(example.token_ids),
        loss_mask=mask,
        logprobs=(0.0,) * length,
        advantages=tuple(map(float, mask)),
        prefix_group=group,
        num_prefix_tokens=num_prefix_tokens,
        domain="supervised",
    )
