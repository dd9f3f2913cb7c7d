import os
import signal
import sqlite3
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
)

from burnish.core.errors import UserError
from burnish.core.vocabulary import DropReason
from burnish.store.ledger import Ledger
from burnish.store.ledger_counts import read_counts
from burnish.store.schema import DROPS, GROUPS, GroupState, sqlite_ddl


def ledger_with(path: Path, *names: str, num_rollouts: int = 8) -> Ledger:
    ledger = Ledger(path / "ledger.sqlite")
    with ledger.transaction():
        for index, name in enumerate(names):
            ledger.dispatch(f"{name}/{index}", name, index, num_rollouts, step=1, version=0)
    return ledger


def totals(ledger: Ledger) -> tuple[int, int, int, dict[str, int]]:
    counts = ledger.counts()
    return counts.dispatched, counts.trained, counts.in_flight, counts.dropped


def test_a_group_goes_from_dispatch_to_training(tmp_path: Path) -> None:
    ledger = ledger_with(tmp_path, "add")
    assert totals(ledger) == (8, 0, 8, {})
    ledger.complete("add/0", step=1)
    assert totals(ledger) == (8, 0, 8, {})
    ledger.train(["add/0"], step=2)
    assert totals(ledger) == (8, 8, 0, {})
    row = ledger.get("add/0")
    assert row is not None
    assert (row.state, row.completed_step, row.resolved_step) == (GroupState.TRAINED, 1, 2)
    assert ledger.counts().groups == {"in_flight": 0, "complete": 0, "trained": 1, "dropped": 0}


def test_parts_of_a_group_are_dropped_while_the_rest_is_trained(tmp_path: Path) -> None:
    ledger = ledger_with(tmp_path, "add")
    ledger.complete("add/0", step=1)
    with ledger.transaction():
        ledger.drop("add/0", DropReason.INVALID, 2, num_rollouts=2)
        ledger.drop("add/0", DropReason.INVALID, 2, num_rollouts=1)
        ledger.drop("add/0", DropReason.STALE, 2, num_rollouts=1)
        ledger.train(["add/0"], step=2)
    assert totals(ledger) == (8, 4, 0, {"invalid": 3, "stale": 1})
    ledger.verify()


def test_a_group_whose_parts_are_all_dropped_is_dropped(tmp_path: Path) -> None:
    ledger = ledger_with(tmp_path, "add", "sort")
    ledger.drop("add/0", DropReason.INVALID, 1, num_rollouts=5)
    ledger.drop("add/0", DropReason.ZERO_VARIANCE, 1)
    ledger.drop("sort/1", DropReason.SURPLUS, 1)
    assert [row.state for row in ledger.groups()] == ["dropped", "dropped"]
    assert totals(ledger) == (16, 0, 0, {"invalid": 5, "zero_variance": 3, "surplus": 8})


ILLEGAL: list[tuple[str, tuple[Any, ...]]] = [
    ("dispatch", ("open/0", "open", 0, 8, 1, 0)),
    ("dispatch", ("done/2", "done", 2, 8, 1, 0)),
    ("complete", ("unknown/0", 1)),
    ("complete", ("ready/1", 1)),
    ("complete", ("done/2", 1)),
    ("train", (["open/0"], 1)),
    ("train", (["ready/1", "ready/1"], 1)),
    ("train", (["ready/1", "unknown/0"], 1)),
    ("train", (["done/2"], 1)),
    ("drop", ("done/2", DropReason.STALE, 1)),
    ("drop", ("lost/3", DropReason.STALE, 1)),
    ("drop", ("open/0", DropReason.STALE, 1, 9)),
    ("drop", ("open/0", DropReason.STALE, 1, 0)),
]


@pytest.mark.parametrize(("method", "arguments"), ILLEGAL)
def test_illegal_transitions_are_refused_and_change_nothing(
    tmp_path: Path, method: str, arguments: tuple[Any, ...]
) -> None:
    ledger = ledger_with(tmp_path, "open", "ready", "done", "lost")
    ledger.complete("ready/1", 1)
    ledger.complete("done/2", 1)
    ledger.train(["done/2"], 1)
    ledger.drop("lost/3", DropReason.STALE, 1)
    before = (ledger.counts(), ledger.groups())
    with pytest.raises(AssertionError):
        getattr(ledger, method)(*arguments)
    assert (ledger.counts(), ledger.groups()) == before
    ledger.verify()


def test_a_failed_transaction_leaves_no_trace(tmp_path: Path) -> None:
    ledger = ledger_with(tmp_path, "add", "sort")
    before = (ledger.counts(), ledger.groups())
    with pytest.raises(KeyError), ledger.transaction():  # noqa: PT012 - the block is the subject
        ledger.complete("add/0", 1)
        ledger.drop("sort/1", DropReason.STALE, 1, num_rollouts=3)
        raise KeyError
    assert (ledger.counts(), ledger.groups()) == before
    ledger.verify()


def test_the_database_itself_refuses_rows_that_do_not_add_up(tmp_path: Path) -> None:
    ledger_with(tmp_path, "add").close()
    with sqlite3.connect(tmp_path / "ledger.sqlite") as db:
        for change in ("trained_rollouts = 1", "open_rollouts = 7", "state = 'trained'",
                       "state = 'nonsense'", "num_rollouts = 0"):  # fmt: skip
            with pytest.raises(sqlite3.IntegrityError):
                db.execute(f"UPDATE groups SET {change}")
    db.close()


def test_totals_survive_closing(tmp_path: Path) -> None:
    ledger = ledger_with(tmp_path, "add", "sort")
    ledger.drop("add/0", DropReason.STALE, 1, num_rollouts=3)
    before = ledger.counts()
    ledger.close()
    assert Ledger(tmp_path / "ledger.sqlite").counts() == before


def test_rollback_undoes_later_steps_by_what_is_stored(tmp_path: Path) -> None:
    names = ("kept", "trained", "unstored", "dropped", "part")
    ledger = ledger_with(tmp_path, *names)
    for index, name in enumerate(names):
        if name != "dropped":
            ledger.complete(f"{name}/{index}", 1)
    ledger.train(["kept/0"], 1)
    ledger.drop("part/4", DropReason.INVALID, 1, num_rollouts=1)
    at_checkpoint = ledger.counts()
    ledger.train(["trained/1", "unstored/2"], 2)
    ledger.drop("dropped/3", DropReason.STALE, 2)
    ledger.drop("part/4", DropReason.INVALID, 2, num_rollouts=2)
    ledger.train(["part/4"], 2)
    ledger.dispatch("late/9", "late", 9, 4, step=2, version=1)
    ledger.drop("late/9", DropReason.STALE, 2, num_rollouts=1)
    ledger.rollback_to(1, stored={"kept/0", "trained/1", "dropped/3", "part/4"})
    found = {r.domain: (r.state.value, r.open_rollouts, r.completed_step) for r in ledger.groups()}
    assert found == {
        "kept": ("trained", 0, 1),
        "trained": ("complete", 8, 1),
        "unstored": ("in_flight", 8, None),
        "dropped": ("in_flight", 8, None),
        "part": ("complete", 7, 1),
    }
    assert totals(ledger) == (
        at_checkpoint.dispatched,
        at_checkpoint.trained,
        at_checkpoint.in_flight,
        at_checkpoint.dropped,
    )
    ledger.verify()


def test_what_was_completed_after_a_checkpoint_can_be_completed_again(tmp_path: Path) -> None:
    """The checkpoint has it in flight; its rollouts are on the disk, and are used."""
    ledger = ledger_with(tmp_path, "add")
    ledger.complete("add/0", 2)
    ledger.rollback_to(1, stored={"add/0"})
    ledger.complete("add/0", 2)
    ledger.train(["add/0"], 2)
    ledger.verify()


def test_rolling_back_twice_is_rolling_back_once(tmp_path: Path) -> None:
    ledger = ledger_with(tmp_path, "add", "sort")
    ledger.complete("add/0", 2)
    ledger.train(["add/0"], 3)
    ledger.rollback_to(1, stored={"add/0"})
    once = ledger.groups()
    ledger.rollback_to(1, stored={"add/0"})
    assert ledger.groups() == once


def test_threads_lose_nothing(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite")

    def work(domain: str) -> None:
        for index in range(20):
            ledger.dispatch(f"{domain}/{index}", domain, index, 4, 1, 0)
            ledger.drop(f"{domain}/{index}", DropReason.INVALID, 1, num_rollouts=1)
            ledger.complete(f"{domain}/{index}", 1)
            ledger.train([f"{domain}/{index}"], 1)

    threads = [threading.Thread(target=work, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert totals(ledger) == (320, 240, 0, {"invalid": 80})
    ledger.verify()


def test_readers_see_a_live_ledger_and_a_read_only_copy(tmp_path: Path) -> None:
    assert read_counts(tmp_path / "ledger.sqlite") is None
    ledger = ledger_with(tmp_path, "add")
    assert read_counts(tmp_path / "ledger.sqlite") == ledger.counts()
    with ledger.transaction():
        ledger.complete("add/0", 1)
        inside = read_counts(tmp_path / "ledger.sqlite")
        assert inside is not None
        assert inside.groups["complete"] == 0
    ledger.close()
    assert read_counts(tmp_path / "ledger.sqlite") is not None


@pytest.mark.parametrize("size", [0, 1, 100, 5000])
def test_a_damaged_ledger_is_told_in_one_line(tmp_path: Path, size: int) -> None:
    ledger_with(tmp_path, "add").close()
    path = tmp_path / "ledger.sqlite"
    whole = path.read_bytes()
    path.write_bytes(b"\x55" * size + whole[size:] if size else b"not a database at all" * 99)
    with pytest.raises(UserError, match="damaged") as caught:
        Ledger(path).verify()
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("version", [0, 2, 99])
def test_another_version_of_the_ledger_is_refused(tmp_path: Path, version: int) -> None:
    ledger_with(tmp_path, "add").close()
    with sqlite3.connect(tmp_path / "ledger.sqlite") as db:
        db.execute(f"PRAGMA user_version = {version}")
    db.close()
    with pytest.raises(UserError, match=f"ledger format {version}, this program reads 1"):
        Ledger(tmp_path / "ledger.sqlite")


def test_the_file_has_the_declared_tables(tmp_path: Path) -> None:
    ledger_with(tmp_path).close()
    with sqlite3.connect(tmp_path / "ledger.sqlite") as db:
        found = {row[0] for row in db.execute("SELECT sql FROM sqlite_master WHERE type = 'table'")}
    db.close()
    assert found == {sqlite_ddl(GROUPS), sqlite_ddl(DROPS)}


WRITER = """
import sys
from pathlib import Path
from burnish.core.vocabulary import DropReason
from burnish.store.ledger import Ledger
ledger = Ledger(Path(sys.argv[1]))
step = int(sys.argv[2])
while True:
    ids = [f"d/{step}-{i}" for i in range(4)]
    with ledger.transaction():
        for i, name in enumerate(ids):
            ledger.dispatch(name, "d", i, 8, step, 0)
            ledger.complete(name, step)
        ledger.drop(ids[0], DropReason.INVALID, step, num_rollouts=3)
        ledger.train(ids[:3], step)
        ledger.drop(ids[3], DropReason.STALE, step)
    sys.stdout.write(f"{step}\\n"); sys.stdout.flush()
    step += 1
"""


def test_a_killed_ledger_holds_every_acknowledged_step_and_no_half(tmp_path: Path) -> None:
    path, step = tmp_path / "ledger.sqlite", 0
    for round_ in range(5):
        command = [sys.executable, "-c", WRITER, str(path), str(step)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            acknowledged = [int(process.stdout.readline()) for _ in range(5 + 3 * round_)]
            os.kill(process.pid, signal.SIGKILL)
            acknowledged += [int(line) for line in process.stdout]
        ledger = Ledger(path)
        ledger.verify()
        per_step = Counter(row.dispatched_step for row in ledger.groups())
        step = len(per_step)
        assert per_step == dict.fromkeys(range(step), 4)
        assert step > acknowledged[-1]
        assert totals(ledger) == (32 * step, 21 * step, 0, {"invalid": 3 * step, "stale": 8 * step})
        ledger.close()


class LedgerMachine(RuleBasedStateMachine):
    """The ledger against a model of plain dictionaries, with rollbacks to any earlier step."""

    ids = Bundle("ids")

    @initialize()
    def open(self) -> None:
        self.ledger = Ledger(Path(":memory:"))
        self.step = 0
        self.next_index = 0
        self.model: dict[str, dict[str, Any]] = {}

    @rule(target=ids, num_rollouts=st.integers(1, 4))
    def dispatch(self, num_rollouts: int) -> str:
        name = f"d/{self.next_index}"
        self.ledger.dispatch(name, "d", self.next_index, num_rollouts, self.step, self.step)
        self.model[name] = {
            "num": num_rollouts, "state": "in_flight", "born": self.step,
            "completed": None, "resolved": None, "drops": [],
        }  # fmt: skip
        self.next_index += 1
        return name

    def open_of(self, group: dict[str, Any]) -> int:
        return int(group["num"] - sum(count for _, _, count in group["drops"]))

    @rule(name=ids)
    def complete(self, name: str) -> None:
        group = self.model.get(name)
        if group is not None and group["state"] == "in_flight":
            self.ledger.complete(name, self.step)
            group |= {"state": "complete", "completed": self.step}
        else:
            with pytest.raises(AssertionError):
                self.ledger.complete(name, self.step)

    @rule(names=st.lists(ids, max_size=3, unique=True))
    def train(self, names: list[str]) -> None:
        groups = [self.model.get(name) for name in names]
        if all(group is not None and group["state"] == "complete" for group in groups):
            self.ledger.train(names, self.step)
            for group in groups:
                assert group is not None
                group |= {"state": "trained", "resolved": self.step}
        else:
            with pytest.raises(AssertionError):
                self.ledger.train(names, self.step)

    @rule(name=ids, reason=st.sampled_from(DropReason), count=st.none() | st.integers(1, 4))
    def drop(self, name: str, reason: DropReason, count: int | None) -> None:
        group = self.model.get(name)
        is_open = group is not None and group["state"] in ("in_flight", "complete")
        if group is None or not is_open or (count or 1) > self.open_of(group):
            with pytest.raises(AssertionError):
                self.ledger.drop(name, reason, self.step, count)
            return
        self.ledger.drop(name, reason, self.step, count)
        group["drops"].append((self.step, reason.value, count or self.open_of(group)))
        if self.open_of(group) == 0:
            group |= {"state": "dropped", "resolved": self.step}

    @rule()
    def next_step(self) -> None:
        self.step += 1

    @rule(back=st.integers(0, 3), stored=st.sets(ids))
    def rollback(self, back: int, stored: set[str]) -> None:
        self.step = max(0, self.step - back)
        self.ledger.rollback_to(self.step, stored)
        for name, group in list(self.model.items()):
            if group["born"] > self.step:
                del self.model[name]
                continue
            group["drops"] = [drop for drop in group["drops"] if drop[0] <= self.step]
            if group["resolved"] is None or group["resolved"] > self.step:
                was_complete = group["completed"] is not None and group["completed"] <= self.step
                is_complete = was_complete and name in stored
                group |= {
                    "state": "complete" if is_complete else "in_flight",
                    "completed": group["completed"] if is_complete else None,
                    "resolved": None,
                }

    @invariant()
    def agrees_with_the_model(self) -> None:
        self.ledger.verify()
        found = {
            row.group_id: (row.state.value, row.completed_step, row.resolved_step)
            for row in self.ledger.groups()
        }
        assert found == {
            name: (g["state"], g["completed"], g["resolved"]) for name, g in self.model.items()
        }
        dropped: Counter[str] = Counter()
        for group in self.model.values():
            for _, reason, count in group["drops"]:
                dropped[reason] += count
        counts = self.ledger.counts()
        assert counts.dropped == dict(dropped)
        assert counts.dispatched == sum(g["num"] for g in self.model.values())
        assert counts.trained == sum(
            self.open_of(g) for g in self.model.values() if g["state"] == "trained"
        )
        assert counts.dispatched == counts.trained + counts.in_flight + sum(dropped.values())

    def teardown(self) -> None:
        if hasattr(self, "ledger"):
            self.ledger.close()


LedgerMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
test_ledger_agrees_with_a_plain_model = LedgerMachine.TestCase
