"""From judged groups to what the trainer eats, and the rule which groups carry no gradient."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from burnish.core.records import Group, Rollout, TrainSequence
from burnish.core.vocabulary import DropReason, Outcome
from burnish.train.advantages import Normaliser, RunningScale, group_to_sequences


class Batch(NamedTuple):
    """A training batch."""

    sequences: tuple[TrainSequence, ...]
    """Of all groups, in dispatch order."""
    advantages: Mapping[str, Sequence[float]]
    """Rollout id -> advantage per token, for the record."""
    num_invalid: Mapping[str, int]
    """Group id -> rollouts without a score, where there are any."""


def drop_reason(group: Group) -> DropReason | None:
    """Why a judged group cannot be learned from; None if it can.

    A group needs two scored rollouts to compare, and two that differ in some credit.
    """
    scored = [r for r in group.rollouts if r.verdict.outcome is Outcome.SCORED]
    if len(scored) < 2:
        return DropReason.INVALID
    return None if len({_credit(r) for r in scored}) > 1 else DropReason.ZERO_VARIANCE


def computed_tokens(group: Group) -> int:
    """What a group costs: its prompt once, and all that follows it in every rollout.

    Sampled tokens alone would make domains with one-word answers look almost free, while their
    prompts are computed all the same.
    """
    prompt = max(r.num_prompt_tokens for r in group.rollouts)
    return prompt + sum(len(r.token_ids) - r.num_prompt_tokens for r in group.rollouts)


def trained_tokens(group: Group) -> int:
    """Sampled tokens of a group that enter the loss."""
    return sum(r.num_sampled_tokens for r in group.rollouts if r.verdict.outcome is Outcome.SCORED)


def make_batch(
    groups: Sequence[Group], scale: RunningScale, normaliser: Normaliser = "domain"
) -> Batch:
    """Credit the tokens of all groups; updates `scale` in the order of the groups."""
    sequences: list[TrainSequence] = []
    advantages: dict[str, Sequence[float]] = {}
    num_invalid: dict[str, int] = {}
    for group in groups:
        credit = group_to_sequences(group, scale, normaliser=normaliser)
        sequences += credit.sequences
        if credit.num_invalid:
            num_invalid[group.group_id] = credit.num_invalid
        scored = (r for r in group.rollouts if r.verdict.outcome is Outcome.SCORED)
        trained = [r.rollout_id for r in scored if any(r.sampled_mask[1:])]
        streams = [s.advantages for s in credit.sequences]
        advantages |= dict(zip(trained, streams, strict=True))
    return Batch(tuple(sequences), advantages, num_invalid)


def _credit(rollout: Rollout) -> tuple[tuple[str, int, float], ...]:
    credits = rollout.verdict.credits
    return tuple(
        sorted((c.source.value, -1 if c.turn is None else c.turn, c.value) for c in credits)
    )
