r"""How far generation may run ahead of training: a ledger of groups and the bounded-lag rule.

    dispatched --> running --completed--> waiting --trained--> (counted)
                      \--------------dropped(reason)---------> (counted)

Bounded lag (invariant 7; AReaL, arXiv 2505.24298, eq. 3): with v versions published so far and
batches of B groups, at most (eta + v + 1) * B groups may have been dispatched and not dropped, so a
group that starts now is due in one of the next eta + 1 batches. Training takes completed groups in
dispatch order and holds a batch rather than let an older group slip past its due version: nothing
goes stale, and nothing is favoured for having been short (invariant 6).

Two modes:

- `bounded_lag`: a dropped group makes room for another one; batches fill with what is trainable.
- `fixed_lag`: the groups of step s are exactly the dispatches [s * B, (s + 1) * B), released when
  version max(0, s - eta) is out. A drop makes the batch smaller, never different, and a version is
  published only when nothing runs: order and content depend on no clock. For reproducible runs.

Everything counts groups. Versions count from the one given at the start.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any

from pydantic import Field

from burnish.core.config import Config
from burnish.core.records import Record
from burnish.core.vocabulary import DropReason
from burnish.schedule.state_version import require_version

STATE_VERSION = 1


class AdmissionMode(StrEnum):
    """When groups are dispatched and trained."""

    BOUNDED_LAG = "bounded_lag"
    """As early as the lag allows: fast."""
    FIXED_LAG = "fixed_lag"
    """At fixed points of the training sequence: reproducible bit for bit."""


class AdmissionConfig(Config):
    """How asynchronous a run is."""

    mode: AdmissionMode = AdmissionMode.BOUNDED_LAG
    """Fast or reproducible."""
    max_lag: int = Field(default=1, ge=0)
    """eta: how many versions old a trained token may be; 0 is on-policy."""
    groups_per_batch: int = Field(default=8, ge=1)
    """B: groups per optimizer step."""
    max_running: int | None = Field(default=None, ge=1)
    """Groups in generation at once, or None for as many as the lag allows."""
    max_refills: int = Field(default=3, ge=0)
    """Batches' worth of replacements for dropped groups per version; after that the step trains on
    what there is. Without it a run whose domains are all solved would sample for ever."""


class GroupState(StrEnum):
    """Where a group in flight is."""

    RUNNING = "running"
    """Dispatched and not yet judged."""
    WAITING = "waiting"
    """Judged, to be trained."""


class GroupEntry(Record, frozen=True, kw_only=True):
    """One group in flight."""

    group_id: str
    """`{domain}/{index}`."""
    order: int
    """Its place among all dispatches, from 0."""
    dispatched_version: int
    """Version that was being served."""
    oldest_version: int
    """Lowest version among its tokens; until it is judged, that of the dispatch."""
    state: GroupState
    """Running or waiting."""


class AdmissionCounts(Record, frozen=True, kw_only=True):
    """The ledger's totals: dispatched = trained + running + waiting + sum of dropped."""

    dispatched: int
    """Groups ever admitted."""
    trained: int
    """Groups in some batch."""
    running: int
    """Groups in generation."""
    waiting: int
    """Groups judged and not yet trained."""
    dropped: dict[DropReason, int]
    """Groups that will never be trained."""


class Admission:
    """The ledger; see the module text."""

    def __init__(
        self, config: AdmissionConfig, version: int = 0, num_steps: int | None = None
    ) -> None:
        """Start empty.

        Args:
            config: how asynchronous the run is.
            version: what the engine serves.
            num_steps: batches in the whole run, so that nothing is dispatched beyond the last one;
                None for a run without an end.
        """
        self._config = config
        self._num_steps = num_steps
        self._batch_taken = False
        self._first_version = version
        self._version = version
        self._dispatched = 0
        self._dispatched_this_version = 0
        self._trained = 0
        self._dropped: dict[DropReason, int] = {}
        self._entries: dict[str, GroupEntry] = {}
        self._num_running = 0

    @property
    def config(self) -> AdmissionConfig:
        """What it was built with."""
        return self._config

    @property
    def version(self) -> int:
        """Version being served."""
        return self._version

    @property
    def step(self) -> int:
        """Versions published since the start: the number of the next batch."""
        return self._version - self._first_version

    @property
    def batch_taken(self) -> bool:
        """Whether this version's batch is already with the trainer."""
        return self._batch_taken

    def entries(self) -> tuple[GroupEntry, ...]:
        """Groups in flight in dispatch order. After a resume, restart those that are running."""
        return tuple(self._entries.values())

    def counts(self) -> AdmissionCounts:
        """Totals."""
        running = self._num_running
        return AdmissionCounts(
            dispatched=self._dispatched,
            trained=self._trained,
            running=running,
            waiting=len(self._entries) - running,
            dropped=dict(self._dropped),
        )

    def capacity(self) -> int:
        """How many groups may be dispatched now."""
        c, in_flight = self._config, len(self._entries)
        last_batch = c.max_lag + self.step + 1
        if self._num_steps is not None:
            last_batch = min(last_batch, self._num_steps)
        horizon = last_batch * c.groups_per_batch
        if c.mode is AdmissionMode.FIXED_LAG:
            room = horizon - self._dispatched
        else:
            # After a short batch fewer than version * B groups were trained; the second bound
            # keeps what is in flight within the batches that are still to come even then.
            batches_left = last_batch - self.step - self._batch_taken
            room = min(
                horizon - self._trained - in_flight,
                batches_left * c.groups_per_batch - in_flight,
            )
            room = min(room, self._budget_this_version() - self._dispatched_this_version)
        if c.max_running is not None:
            room = min(room, c.max_running - self._num_running)
        return max(room, 0)

    def may_dispatch(self) -> bool:
        """Whether there is room for one more."""
        return self.capacity() > 0

    def exhausted(self) -> bool:
        """Whether this version's dispatches are used up, replacements included."""
        return (
            self._config.mode is AdmissionMode.BOUNDED_LAG
            and self._dispatched_this_version >= self._budget_this_version()
        )

    def may_publish(self) -> bool:
        """Whether weights may be swapped now.

        Always, but in fixed-lag mode only when nothing runs and all that belongs to this version
        is dispatched: no group may see two versions, or one that depends on the clock.
        """
        if self._config.mode is AdmissionMode.BOUNDED_LAG:
            return True
        return self._num_running == 0 and not self.may_dispatch()

    def admissible(self, oldest_version: int) -> bool:
        """Whether tokens of that version may be trained on now."""
        return self._version - oldest_version <= self._config.max_lag

    def used_lag(self, group_id: str) -> float:
        """Part of the lag that a group has used: 1.0 is due now; 0.0 if it is not in flight."""
        entry = self._entries.get(group_id)
        if entry is None or self._config.max_lag == 0:
            return 0.0
        return (self._version - entry.dispatched_version) / self._config.max_lag

    def dispatched(self, group_id: str) -> GroupEntry:
        """Enter a group; only when `may_dispatch()`."""
        assert self.may_dispatch(), "dispatch beyond the lag bound"
        assert group_id not in self._entries, f"{group_id} is already in flight"
        entry = GroupEntry(
            group_id=group_id,
            order=self._dispatched,
            dispatched_version=self._version,
            oldest_version=self._version,
            state=GroupState.RUNNING,
        )
        self._entries[group_id] = entry
        self._num_running += 1
        self._dispatched += 1
        self._dispatched_this_version += 1
        return entry

    def completed(self, group_id: str, oldest_version: int | None = None) -> None:
        """A running group was judged and is trainable.

        Args:
            group_id: which.
            oldest_version: lowest version among its sampled tokens, if known. It can lie below the
                dispatch's only if weights were announced before the engine served them.
        """
        entry = self._entries[group_id]
        assert entry.state is GroupState.RUNNING, f"{group_id} completed twice"
        self._num_running -= 1
        self._entries[group_id] = GroupEntry(
            group_id=group_id,
            order=entry.order,
            dispatched_version=entry.dispatched_version,
            oldest_version=entry.oldest_version if oldest_version is None else oldest_version,
            state=GroupState.WAITING,
        )

    def dropped(self, group_id: str, reason: DropReason) -> None:
        """A group in flight will not be trained."""
        entry = self._entries.pop(group_id)
        self._num_running -= entry.state is GroupState.RUNNING
        self._dropped[reason] = self._dropped.get(reason, 0) + 1

    def trained(self, group_ids: Sequence[str]) -> None:
        """A batch, possibly empty, was taken by the trainer. One per version."""
        assert not self._batch_taken, "a second batch before the first was published"
        for group_id in group_ids:
            entry = self._entries.pop(group_id)
            assert entry.state is GroupState.WAITING, f"{group_id} trained before it was judged"
            assert self.admissible(entry.oldest_version), f"{group_id} is stale"
        self._trained += len(group_ids)
        self._batch_taken = True

    def published(self, version: int) -> None:
        """The engine serves `version` from now on: the weights after this version's batch."""
        assert self._batch_taken, f"version {version} published without a batch"
        assert version == self._version + 1, f"version {version} after {self._version}"
        assert self.may_publish(), "fixed lag: a group still runs, or is due, under the old version"
        self._version = version
        self._dispatched_this_version = 0
        self._batch_taken = False

    def state(self) -> dict[str, Any]:
        """All that `from_state` needs, as JSON values."""
        return {
            "version": STATE_VERSION,
            "first_weights": self._first_version,
            "weights": self._version,
            "num_steps": self._num_steps,
            "batch_taken": self._batch_taken,
            "dispatched": self._dispatched,
            "dispatched_this_version": self._dispatched_this_version,
            "trained": self._trained,
            "dropped": {str(reason): n for reason, n in self._dropped.items()},
            "entries": [
                [e.group_id, e.order, e.dispatched_version, e.oldest_version, str(e.state)]
                for e in self._entries.values()
            ],
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any], config: AdmissionConfig) -> Admission:
        """Continue exactly where `state` was taken.

        Raises:
            UserError: if another version of the program wrote it.
        """
        require_version(state, STATE_VERSION, "admission ledger")
        ledger = cls(config, state["first_weights"], state["num_steps"])
        ledger._batch_taken = state["batch_taken"]
        ledger._version = state["weights"]
        ledger._dispatched = state["dispatched"]
        ledger._dispatched_this_version = state["dispatched_this_version"]
        ledger._trained = state["trained"]
        ledger._dropped = {DropReason(reason): n for reason, n in state["dropped"].items()}
        for group_id, order, dispatched, oldest, group_state in state["entries"]:
            ledger._entries[group_id] = GroupEntry(
                group_id=group_id,
                order=order,
                dispatched_version=dispatched,
                oldest_version=oldest,
                state=GroupState(group_state),
            )
        ledger._num_running = sum(e.state is GroupState.RUNNING for e in ledger._entries.values())
        return ledger

    def _budget_this_version(self) -> int:
        """Dispatches allowed before the next publication: what can be due, and its replacements."""
        c = self._config
        return (c.max_lag + 1 + c.max_refills) * c.groups_per_batch
