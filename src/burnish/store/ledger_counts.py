"""Totals of the ledger and the conservation law that ties them together."""

import sqlite3
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from burnish.core.errors import UserError
from burnish.core.records import Record
from burnish.core.vocabulary import DropReason
from burnish.store.schema import GroupState


class LedgerCounts(Record, frozen=True, kw_only=True):
    """Totals in rollouts: `dispatched == trained + in_flight + sum(dropped.values())`."""

    dispatched: int
    """Ever dispatched."""
    trained: int
    """Entered a loss."""
    in_flight: int
    """Neither trained nor dropped: being sampled, or waiting to be trained."""
    dropped: dict[str, int]
    """By reason; reasons that never occurred are absent."""
    groups: dict[str, int]
    """Number of groups in each state; all states are present."""


class CountedRow(Protocol):
    """The part of a ledger row that is counted."""

    @property
    def state(self) -> GroupState:
        """Where the group is."""
        ...

    @property
    def num_rollouts(self) -> int:
        """Dispatched."""
        ...

    @property
    def open_rollouts(self) -> int:
        """Neither trained nor dropped."""
        ...

    @property
    def trained_rollouts(self) -> int:
        """Trained."""
        ...


@dataclass
class Tally:
    """Running totals."""

    dispatched: int = 0
    trained: int = 0
    in_flight: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    groups: Counter[str] = field(default_factory=Counter)

    def add(self, row: CountedRow) -> None:
        """Count a row, apart from its drops."""
        self._count(row, 1)

    def remove(self, row: CountedRow) -> None:
        """Take a row out, apart from its drops."""
        self._count(row, -1)

    def add_drop(self, reason: DropReason, num_rollouts: int) -> None:
        """Count dropped rollouts."""
        self.dropped[reason.value] += num_rollouts

    def check(self) -> None:
        """Invariant 2: nothing vanishes."""
        accounted = self.trained + self.in_flight + self.dropped.total()
        assert self.dispatched == accounted, f"ledger lost rollouts: {self}"

    def counts(self) -> LedgerCounts:
        """An immutable copy."""
        return LedgerCounts(
            dispatched=self.dispatched,
            trained=self.trained,
            in_flight=self.in_flight,
            dropped={r.value: n for r in DropReason if (n := self.dropped[r.value])},
            groups={state.value: self.groups[state.value] for state in GroupState},
        )

    def copy(self) -> "Tally":
        """An independent copy."""
        return Tally(
            self.dispatched, self.trained, self.in_flight, self.dropped.copy(), self.groups.copy()
        )

    def _count(self, row: CountedRow, sign: int) -> None:
        self.dispatched += sign * row.num_rollouts
        self.trained += sign * row.trained_rollouts
        self.in_flight += sign * row.open_rollouts
        self.groups[row.state.value] += sign


def recount(db: sqlite3.Connection) -> Tally:
    """Totals from the tables themselves, rollouts by two independent paths: groups and drops."""
    tally = Tally()
    query = (
        "SELECT state, COUNT(*), SUM(num_rollouts), SUM(trained_rollouts), SUM(open_rollouts)"
        " FROM groups GROUP BY state"
    )
    for state, groups, dispatched, trained, in_flight in db.execute(query):
        tally.groups[state] = groups
        tally.dispatched += dispatched
        tally.trained += trained
        tally.in_flight += in_flight
    tally.dropped.update(
        dict(db.execute("SELECT reason, SUM(num_rollouts) FROM drops GROUP BY reason").fetchall())
    )
    return tally


def read_counts(path: Path) -> LedgerCounts | None:
    """Totals of a ledger that another process may be writing; None if there is none yet."""
    if not path.exists():
        return None
    # A directory that may not be written has no place for the log's shared memory: a finished run
    # there is read as it lies.
    for options in ("mode=ro", "immutable=1"):
        db = sqlite3.connect(f"{path.absolute().as_uri()}?{options}", uri=True)
        try:
            db.execute("BEGIN")
            tally = recount(db)
        except sqlite3.OperationalError:
            if options == "immutable=1":
                return None
        except sqlite3.DatabaseError as error:
            fix = "restore this file from a copy."
            raise UserError(f"{path}: damaged ({error}).", fix=fix) from None
        else:
            tally.check()
            return tally.counts()
        finally:
            db.close()
    return None
