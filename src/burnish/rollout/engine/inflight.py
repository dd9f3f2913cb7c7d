"""What becomes of requests that are under way when what they are computed with changes."""

from collections.abc import Iterable

from burnish.core.records import Generation
from burnish.core.vocabulary import InFlight, StopReason
from burnish.rollout.engine.scheduler import Scheduler
from burnish.rollout.engine.sequence import Sequence


def everyone(scheduler: Scheduler) -> list[Sequence]:
    """All requests that have not ended."""
    return [*scheduler.running, *scheduler.waiting]


def settle(
    scheduler: Scheduler, affected: Iterable[Sequence], inflight: InFlight
) -> list[tuple[Sequence, Generation]]:
    """Keep, restart or end them; returns what ended.

    Prompt log-probs come from one version: a prompt that is still being read is read again.
    """
    ended = []
    for sequence in affected:
        started = bool(sequence.num_computed or sequence.num_sampled)
        if inflight is InFlight.ABORT and started:
            scheduler.remove(sequence)
            ended.append((sequence, sequence.result(StopReason.ABORTED)))
        elif inflight is InFlight.RECOMPUTE or sequence.wants_prompt:
            scheduler.restart(sequence)
        if sequence.wants_prompt:
            sequence.prompt_logprobs = []
    return ended
