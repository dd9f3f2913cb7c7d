"""Which groups make the next batch: dispatch order, never speed.

A batch takes the first B judged groups in dispatch order, but only if everything still in flight
can then make its own due batch: with deadlines (dispatched version + eta) that means, for every j,
that at most j * B groups are left that are due within the next j batches. Otherwise the batch is
held, and the plan names whom it waits for. Taking the earliest deadline first is optimal for this
test (Jackson 1955), so a batch is never held without need.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from burnish.core.records import Record
from burnish.schedule.admission import Admission, AdmissionMode, GroupEntry, GroupState


class BatchStatus(StrEnum):
    """Whether a batch can be trained now."""

    READY = "ready"
    """`group_ids` is the next batch; it can be short, even empty, when too many were dropped."""
    FILLING = "filling"
    """Too few groups are judged, or this version's batch is still with the trainer."""
    HELD = "held"
    """Enough are judged, but `waits_for` would go stale if it were passed over."""


class BatchPlan(Record, frozen=True, kw_only=True):
    """What to do about the next batch."""

    status: BatchStatus
    """Whether it is ready."""
    group_ids: tuple[str, ...] = ()
    """To be trained, in dispatch order; empty unless ready."""
    stale: tuple[str, ...] = ()
    """Judged groups beyond the lag: drop them as `stale`. Empty as long as the engine serves what
    was announced."""
    waits_for: tuple[str, ...] = ()
    """Running groups that hold it up, oldest first; empty when ready."""


def plan_batch(ledger: Admission) -> BatchPlan:
    """Decide; changes nothing. Tell the ledger `trained` or `dropped` afterwards."""
    entries = ledger.entries()
    stale = tuple(
        e.group_id
        for e in entries
        if e.state is GroupState.WAITING and not ledger.admissible(e.oldest_version)
    )
    if ledger.batch_taken:
        return BatchPlan(status=BatchStatus.FILLING, stale=stale)
    gone = frozenset(stale)
    live = [e for e in entries if e.group_id not in gone]
    if ledger.config.mode is AdmissionMode.FIXED_LAG:
        return _fixed(ledger, live, stale)
    return _bounded(ledger, live, stale)


def _fixed(ledger: Admission, live: Sequence[GroupEntry], stale: tuple[str, ...]) -> BatchPlan:
    end = (ledger.step + 1) * ledger.config.groups_per_batch
    members = [e for e in live if e.order < end]
    running = _running(members)
    if running or ledger.counts().dispatched < end:
        return BatchPlan(status=BatchStatus.FILLING, stale=stale, waits_for=running)
    return BatchPlan(status=BatchStatus.READY, group_ids=_ids(members), stale=stale)


def _bounded(ledger: Admission, live: Sequence[GroupEntry], stale: tuple[str, ...]) -> BatchPlan:
    size = ledger.config.groups_per_batch
    chosen = [e for e in live if e.state is GroupState.WAITING][:size]
    running = _running(live)
    short = not running and ledger.exhausted()
    if len(chosen) < size and not short:
        return BatchPlan(status=BatchStatus.FILLING, stale=stale, waits_for=running)
    late = _cannot_all_be_in_time(ledger, live, frozenset(_ids(chosen)))
    if late:
        return BatchPlan(status=BatchStatus.HELD, stale=stale, waits_for=late)
    return BatchPlan(status=BatchStatus.READY, group_ids=_ids(chosen), stale=stale)


def _cannot_all_be_in_time(
    ledger: Admission, live: Sequence[GroupEntry], taken: frozenset[str]
) -> tuple[str, ...]:
    """Running groups due too soon for the batches that remain once `taken` is trained."""
    last, size = ledger.version - ledger.config.max_lag, ledger.config.groups_per_batch
    due: list[GroupEntry] = []
    left = [e for e in live if e.group_id not in taken]
    # In dispatch order versions never fall, so those due within j batches are a prefix of `left`.
    for batches in range(ledger.config.max_lag + 1):
        while len(due) < len(left) and left[len(due)].dispatched_version <= last + batches:
            due.append(left[len(due)])
        if len(due) > batches * size and (running := _running(due)):
            return running
    return ()


def _running(entries: Sequence[GroupEntry]) -> tuple[str, ...]:
    return _ids([e for e in entries if e.state is GroupState.RUNNING])


def _ids(entries: Sequence[GroupEntry]) -> tuple[str, ...]:
    return tuple(e.group_id for e in entries)
