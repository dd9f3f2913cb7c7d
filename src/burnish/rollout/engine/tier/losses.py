"""Whose keys and values were lost, and what those requests are told."""

from collections.abc import Sequence as Seq

from burnish.core.records import Failure
from burnish.core.vocabulary import FailureKind
from burnish.rollout.engine.batch import Work
from burnish.rollout.engine.cache.storage import Losses
from burnish.rollout.engine.sequence import Sequence

_WHERE = "rollout.engine.tier"


def lost_requests(losses: Losses, work: Seq[Work]) -> dict[Sequence, Failure]:
    """The requests of a step that cannot go on.

    A full disk ends the request that holds the most: that frees the most for all others.
    """
    lost: dict[Sequence, Failure] = {}
    for sequence, _ in work if losses.pages else ():
        problem = next(
            (losses.pages[page] for page in sequence.pages if page in losses.pages), None
        )
        if problem is not None:
            lost[sequence] = _failure(f"keys and values of this request were lost: {problem}")
    if losses.full is not None and not lost:
        largest = max((sequence for sequence, _ in work), key=_num_pages)
        lost[largest] = _failure(
            f"keys and values of this request do not fit: {losses.full}; raise engine.kv.disk_mb "
            "or engine.kv.ram_mb, or free space in engine.kv.disk_dir"
        )
    return lost


def _num_pages(sequence: Sequence) -> int:
    return len(sequence.held_pages)


def _failure(message: str) -> Failure:
    return Failure(kind=FailureKind.INFRA, where=_WHERE, message=message)
