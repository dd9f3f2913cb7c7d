"""The ledger: what became of every group that was dispatched (invariant 2), exactly once.

    dispatch --> in_flight --complete--> complete --train--> trained
                     |                      |
                     '-------- drop --------'--> dropped (or fewer open rollouts, if partial)

Rollouts are conserved: dispatched = trained + in flight + dropped(reason). SQLite checks it for
every row at every statement; the sums are checked at every commit. `step` is always the optimizer
step that the call belongs to: what belongs to step s is kept by `rollback_to(s)`.
"""

import sqlite3
import threading
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

from burnish.core.disk import DiskFullError, free_bytes
from burnish.core.errors import UserError
from burnish.core.vocabulary import DropReason
from burnish.store.ledger_counts import LedgerCounts, recount
from burnish.store.schema import DROPS, GROUPS, GroupState, sqlite_ddl

LEDGER_FORMAT_VERSION: Final = 1
# SQLite grows the index of the write-ahead log by this much at a time.
_SHARED_MEMORY_BYTES = 32 * 1024


class GroupRow(NamedTuple):
    """A row of `groups`; the fields are those of the schema, in its order."""

    group_id: str
    domain: str
    task_index: int
    num_rollouts: int
    dispatched_step: int
    dispatched_version: int
    completed_step: int | None
    resolved_step: int | None
    state: GroupState
    open_rollouts: int
    trained_rollouts: int
    dropped_rollouts: int


class Ledger:
    """One writer per file (the run directory's lock sees to it). May be called from any thread."""

    def __init__(self, path: Path, *, must_exist: bool = False) -> None:
        """Open or create the ledger at `path`.

        Raises:
            UserError: if it is damaged or of another version, or absent or empty but `must_exist`.
            DiskFullError: if there is no room to create it.
        """
        self._path = path
        self._lock = threading.RLock()
        self._depth = 0
        if must_exist and not path.exists():
            raise _damaged(path, "absent")
        with self._errors_told():
            self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = FULL")
            self._prepare(must_exist)
            self._tally = recount(self._db)
        self._tally.check()

    def dispatch(
        self, group_id: str, domain: str, index: int, num_rollouts: int, step: int, version: int
    ) -> None:
        """Note a new group of `num_rollouts`, in flight. An id is dispatched once."""
        row = GroupRow(
            group_id=group_id,
            domain=domain,
            task_index=index,
            num_rollouts=num_rollouts,
            dispatched_step=step,
            dispatched_version=version,
            completed_step=None,
            resolved_step=None,
            state=GroupState.IN_FLIGHT,
            open_rollouts=num_rollouts,
            trained_rollouts=0,
            dropped_rollouts=0,
        )
        with self.transaction():
            assert self.get(group_id) is None, f"{group_id} is dispatched twice"
            marks = ", ".join("?" * len(row))
            self._db.execute(f"INSERT INTO groups VALUES ({marks})", row)
            self._tally.add(row)

    def complete(self, group_id: str, step: int) -> None:
        """All rollouts of the group are judged and stored."""
        with self.transaction():
            row = self._expect(group_id, GroupState.IN_FLIGHT)
            self._update(row, row._replace(state=GroupState.COMPLETE, completed_step=step))

    def train(self, group_ids: Iterable[str], step: int) -> None:
        """All open rollouts of these complete groups enter the loss of `step`.

        Drop the parts that do not (`drop(..., num_rollouts=n)`) before, in the same transaction.
        """
        with self.transaction():
            for group_id in group_ids:
                row = self._expect(group_id, GroupState.COMPLETE)
                new = row._replace(
                    state=GroupState.TRAINED,
                    resolved_step=step,
                    trained_rollouts=row.open_rollouts,
                    open_rollouts=0,
                )
                self._update(row, new)

    def drop(
        self, group_id: str, reason: DropReason, step: int, num_rollouts: int | None = None
    ) -> None:
        """Give up `num_rollouts` of an open group, or all that are open.

        A group without open rollouts is dropped. `rollback_to` brings back what was dropped later,
        so drop parts in the transaction that trains the rest, not when the group completes.
        """
        with self.transaction():
            row = self._expect(group_id, GroupState.IN_FLIGHT, GroupState.COMPLETE)
            count = row.open_rollouts if num_rollouts is None else num_rollouts
            assert 0 < count <= row.open_rollouts, f"{group_id}: drop {count}, {row}"
            left = row.open_rollouts - count
            new = row._replace(open_rollouts=left, dropped_rollouts=row.dropped_rollouts + count)
            if left == 0:
                new = new._replace(state=GroupState.DROPPED, resolved_step=step)
            self._db.execute(
                "INSERT INTO drops (group_id, reason, step, num_rollouts) VALUES (?, ?, ?, ?)"
                " ON CONFLICT DO UPDATE SET num_rollouts = num_rollouts + excluded.num_rollouts",
                (group_id, reason, step, count),
            )
            self._update(row, new)
            self._tally.add_drop(reason, count)

    def counts(self) -> LedgerCounts:
        """Totals, in rollouts and in groups."""
        with self._lock:
            return self._tally.counts()

    def get(self, group_id: str) -> GroupRow | None:
        """The row of a group, if it was dispatched."""
        with self._lock, self._errors_told():
            found = self._db.execute("SELECT * FROM groups WHERE group_id = ?", (group_id,))
            row = found.fetchone()
        return None if row is None else _group_row(row)

    def groups(self, *states: GroupState) -> list[GroupRow]:
        """Rows in these states (all, if none is named), in the order of dispatch."""
        wanted = states or tuple(GroupState)
        marks = ", ".join("?" * len(wanted))
        query = f"SELECT * FROM groups WHERE state IN ({marks}) ORDER BY rowid"
        with self._lock, self._errors_told():
            return [_group_row(row) for row in self._db.execute(query, wanted)]

    def rollback_to(self, step: int, stored: Collection[str]) -> None:
        """Undo everything that belongs to later steps than `step`, in one transaction.

        Groups dispatched later vanish. Drops and training done later are undone: such a group is
        complete again if it was at the end of `step` and its rollouts are in `stored`, else in
        flight; likewise all open groups. What was completed later is in flight, as the checkpoint
        has it, though its rollouts are on the disk: who goes on completes it with them.

        Args:
            step: step of the checkpoint that the run goes on from.
            stored: ids of the groups whose rollouts are on the disk.
        """
        with self.transaction():
            later = (step,)
            self._db.execute(
                "DELETE FROM drops WHERE step > ? OR group_id IN"
                " (SELECT group_id FROM groups WHERE dispatched_step > ?)",
                (step, step),
            )
            self._db.execute("DELETE FROM groups WHERE dispatched_step > ?", later)
            dropped = dict(
                self._db.execute("SELECT group_id, SUM(num_rollouts) FROM drops GROUP BY group_id")
            )
            query = "SELECT * FROM groups WHERE resolved_step IS NULL OR resolved_step > ?"
            for raw in self._db.execute(query, later).fetchall():
                row = _group_row(raw)
                self._write(_reopened(row, step, dropped.get(row.group_id, 0), stored))
            self._tally = recount(self._db)

    def verify(self) -> None:
        """Count everything anew and compare with the running totals."""
        with self._lock, self._errors_told():
            fresh = recount(self._db)
        fresh.check()
        assert fresh == self._tally, f"ledger totals drifted: {self._tally} != {fresh}"

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Several transitions as one: all or none, with one wait for the disk. May be nested."""
        with self._lock, self._errors_told():
            if self._depth:
                self._depth += 1
                try:
                    yield
                finally:
                    self._depth -= 1
                return
            before = self._tally.copy()
            self._db.execute("BEGIN IMMEDIATE")
            self._depth = 1
            try:
                yield
                self._tally.check()
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                self._tally = before
                raise
            finally:
                self._depth = 0

    def close(self) -> None:
        """Fold the write-ahead log into the file and close it. May be called twice."""
        with self._lock:
            self._db.close()

    def _prepare(self, must_exist: bool) -> None:
        found = self._db.execute("PRAGMA user_version").fetchone()[0]
        if found == LEDGER_FORMAT_VERSION:
            # Not quick_check, which does not compare indexes with tables: opening 10,000 groups
            # takes 19 ms of CPU in all.
            problem = self._db.execute("PRAGMA integrity_check(1)").fetchone()[0]
            if problem != "ok":
                raise _damaged(self._path, " ".join(problem.split()))
            return
        tables = self._db.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()[0]
        if found != 0 or tables:
            raise UserError(
                f"{self._path}: ledger format {found}, this program reads {LEDGER_FORMAT_VERSION}.",
                fix="resume the run with the version of burnish that wrote it.",
            )
        # A file cut to nothing is a valid database of nothing; using it would forget the run.
        if must_exist:
            raise _damaged(self._path, "empty")
        self._db.execute("BEGIN IMMEDIATE")
        self._db.execute(sqlite_ddl(GROUPS))
        self._db.execute(sqlite_ddl(DROPS))
        self._db.execute("CREATE INDEX groups_by_state ON groups (state)")
        self._db.execute(f"PRAGMA user_version = {LEDGER_FORMAT_VERSION}")
        self._db.execute("COMMIT")

    def _expect(self, group_id: str, *states: GroupState) -> GroupRow:
        row = self.get(group_id)
        assert row is not None, f"{group_id} was never dispatched"
        assert row.state in states, f"{group_id} is {row.state}, expected {' or '.join(states)}"
        return row

    def _update(self, old: GroupRow, new: GroupRow) -> None:
        self._write(new)
        self._tally.remove(old)
        self._tally.add(new)

    def _write(self, row: GroupRow) -> None:
        columns = ", ".join(f"{name} = ?" for name in GROUPS.names[1:])
        self._db.execute(f"UPDATE groups SET {columns} WHERE group_id = ?", (*row[1:], row[0]))

    @contextmanager
    def _errors_told(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.DatabaseError as error:
            code = getattr(error, "sqlite_errorcode", None)
            if _means_full(code, self._path):
                raise DiskFullError(self._path) from error
            if code in (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT):
                raise _damaged(self._path, str(error)) from error
            raise


def _means_full(code: int | None, path: Path) -> bool:
    # A full disk shows as an I/O error when the shared memory of the write-ahead log cannot grow.
    io_errors = (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_IOERR_WRITE, sqlite3.SQLITE_IOERR_SHMSIZE)
    is_tight = free_bytes(path) < _SHARED_MEMORY_BYTES
    return code == sqlite3.SQLITE_FULL or (code in io_errors and is_tight)


def _damaged(path: Path, why: str) -> UserError:
    fix = "restore this file from a copy, or start a new run."
    return UserError(f"{path}: damaged ({why}).", fix=fix)


def _group_row(row: Any) -> GroupRow:
    found = GroupRow(*row)
    return found._replace(state=GroupState(found.state))


def _reopened(row: GroupRow, step: int, dropped: int, stored: Collection[str]) -> GroupRow:
    was_complete = row.completed_step is not None and row.completed_step <= step
    is_complete = was_complete and row.group_id in stored
    return row._replace(
        state=GroupState.COMPLETE if is_complete else GroupState.IN_FLIGHT,
        completed_step=row.completed_step if is_complete else None,
        resolved_step=None,
        trained_rollouts=0,
        dropped_rollouts=dropped,
        open_rollouts=row.num_rollouts - dropped,
    )
