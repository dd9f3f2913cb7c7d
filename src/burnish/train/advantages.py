"""From a judged group to training sequences: who gets which credit.

Each credit source has its own leave-one-out baseline over the scored rollouts of the group
(Kool et al. 2019: the mean of the *others*, so that the policy gradient stays unbiased). The credit
of a span lands on the sampled tokens of that span. A running scale per domain, never the standard
deviation of the group, brings domains to one size: a group's own deviation would re-weight tasks by
difficulty (Dr. GRPO, 2503.20783) and bends the gradient's direction.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from burnish.core.records import CreditSpan, Group, Rollout, TrainSequence
from burnish.core.vocabulary import CreditSource, Outcome, StopReason

Normaliser = Literal["domain", "group"]

# Scores lie in [0, 1], so 0.5 is the largest deviation: the first groups are never amplified.
_INITIAL_STD = 0.5
# Advantages closer to zero than this are rounding, not credit.
_ZERO = 1e-9


class GroupCredit(NamedTuple):
    """A group as the trainer sees it."""

    sequences: tuple[TrainSequence, ...]
    """One per scored rollout with sampled tokens; empty where nothing can be compared."""
    zero_variance: bool
    """At least two rollouts were scored and every advantage is zero."""
    num_invalid: int
    """Rollouts without a score: in no baseline, in no denominator."""


class RunningScale:
    """Standard deviation of scores per domain, exponentially forgotten, with a floor.

    A pure state machine: same observations, same state.
    """

    def __init__(self, *, decay: float = 0.95, floor: float = 0.1) -> None:
        """Start empty.

        Args:
            decay: share of the old moments kept at each group; 0.95 remembers about 20 groups.
            floor: least scale; a domain where everybody fails must not blow up its first success.
        """
        assert 0 <= decay < 1
        assert floor > 0
        self._decay, self._floor = decay, floor
        self._moments: dict[str, tuple[float, float]] = {}

    def observe(self, domain: str, scores: Sequence[float]) -> None:
        """Take in the scores of one group."""
        if not scores:
            return
        mean = math.fsum(scores) / len(scores)
        square = math.fsum(s * s for s in scores) / len(scores)
        old = self._moments.get(domain, (mean, mean * mean + _INITIAL_STD**2))
        keep = self._decay
        self._moments[domain] = (
            keep * old[0] + (1 - keep) * mean,
            keep * old[1] + (1 - keep) * square,
        )

    def scale(self, domain: str) -> float:
        """Divisor for the domain's advantages, at least the floor."""
        if domain not in self._moments:
            return max(_INITIAL_STD, self._floor)
        mean, square = self._moments[domain]
        return max(math.sqrt(max(square - mean * mean, 0.0)), self._floor)

    def state(self) -> dict[str, list[float]]:
        """JSON-ready state."""
        return {domain: list(pair) for domain, pair in sorted(self._moments.items())}

    @classmethod
    def from_state(
        cls, state: Mapping[str, Sequence[float]], *, decay: float = 0.95, floor: float = 0.1
    ) -> "RunningScale":
        """Continue from `state`."""
        scale = cls(decay=decay, floor=floor)
        scale._moments = {domain: (pair[0], pair[1]) for domain, pair in state.items()}
        return scale


def group_to_sequences(
    group: Group, scale: RunningScale, *, normaliser: Normaliser = "domain"
) -> GroupCredit:
    """Credit the sampled tokens of a group.

    Divides by the domain's scale as it stood *before* this group (a divisor that depended on the
    group's own luck would bias the gradient), then lets `scale` observe the group's scores.

    Args:
        group: judged rollouts of one task.
        scale: running scale per domain; updated.
        normaliser: `domain`, or `group` for GRPO's division by the group's standard deviation.
    """
    scored = [r for r in group.rollouts if r.verdict.outcome is Outcome.SCORED]
    num_invalid = len(group.rollouts) - len(scored)
    scores = [r.verdict.score for r in scored if r.verdict.score is not None]
    assert len(scores) == len(scored), "a scored verdict has a score"
    divisor = _group_std(scores) if normaliser == "group" else scale.scale(group.domain)
    scale.observe(group.domain, scores)
    if len(scored) < 2:
        return GroupCredit((), False, num_invalid)
    baselines = _leave_one_out([_source_values(r) for r in scored])
    streams = [_advantages(r, b, divisor) for r, b in zip(scored, baselines, strict=True)]
    if all(abs(a) < _ZERO for stream in streams for a in stream):
        streams = [(0.0,) * len(stream) for stream in streams]
    num_prefix = _common_prefix(scored)
    sequences = tuple(
        _sequence(rollout, stream, num_prefix)
        for rollout, stream in zip(scored, streams, strict=True)
        if any(_loss_mask(rollout))
    )
    zero = not any(a for stream in streams for a in stream)
    return GroupCredit(sequences, zero, num_invalid)


def _group_std(scores: Sequence[float]) -> float:
    """Unbiased deviation plus GRPO's 1e-6; 1 where it is not defined."""
    if len(scores) < 2:
        return 1.0
    mean = math.fsum(scores) / len(scores)
    return math.sqrt(math.fsum((s - mean) ** 2 for s in scores) / (len(scores) - 1)) + 1e-6


def _source_values(rollout: Rollout) -> dict[CreditSource, float]:
    """Weighted mean value of each source."""
    spans: dict[CreditSource, list[CreditSpan]] = defaultdict(list)
    for span in rollout.spans:
        if span.weight > 0:
            spans[span.source].append(span)
    return {
        source: math.fsum(s.weight * s.value for s in parts) / math.fsum(s.weight for s in parts)
        for source, parts in spans.items()
    }


def _leave_one_out(
    values: Sequence[Mapping[CreditSource, float]],
) -> list[dict[CreditSource, float]]:
    """Mean of each source over the other rollouts; absent where no other rollout has it."""
    baselines: list[dict[CreditSource, float]] = []
    for i, own in enumerate(values):
        baseline = {}
        for source in own:
            others = [v[source] for j, v in enumerate(values) if j != i and source in v]
            if others:
                baseline[source] = math.fsum(others) / len(others)
        baselines.append(baseline)
    return baselines


def _advantages(
    rollout: Rollout, baseline: Mapping[CreditSource, float], divisor: float
) -> tuple[float, ...]:
    """Per-token advantage, length L."""
    stream = [0.0] * len(rollout.token_ids)
    mask = _loss_mask(rollout)
    for span in rollout.spans:
        if span.source not in baseline:
            continue
        credit = span.weight * (span.value - baseline[span.source]) / divisor
        for i in range(span.start, span.end):
            if mask[i]:
                stream[i] += credit
    return tuple(stream)


def _loss_mask(rollout: Rollout) -> tuple[bool, ...]:
    """Sampled tokens outside aborted turns; the first token has nothing to be predicted from."""
    mask = list(rollout.sampled_mask)
    for turn in rollout.turns:
        if turn.stop_reason is StopReason.ABORTED:
            mask[turn.start : turn.end] = [False] * (turn.end - turn.start)
    mask[:1] = [False] * len(mask[:1])
    return tuple(mask)


def _common_prefix(rollouts: Sequence[Rollout]) -> int:
    """Tokens that all share, at most the shortest opening prompt."""
    length = min(r.num_prompt_tokens for r in rollouts)
    first = rollouts[0].token_ids
    for rollout in rollouts[1:]:
        ids = rollout.token_ids
        length = next((i for i in range(length) if ids[i] != first[i]), length)
    return length


def _sequence(rollout: Rollout, stream: tuple[float, ...], num_prefix: int) -> TrainSequence:
    mask = _loss_mask(rollout)
    logprobs = (p if m else 0.0 for p, m in zip(rollout.logprobs, mask, strict=True))
    return TrainSequence(
        token_ids=rollout.token_ids,
        loss_mask=mask,
        logprobs=tuple(logprobs),
        advantages=stream,
        prefix_group=rollout.group_id,
        num_prefix_tokens=num_prefix,
        domain=rollout.domain,
    )
