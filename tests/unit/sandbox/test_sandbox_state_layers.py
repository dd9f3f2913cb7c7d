from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from burnish.sandbox.native.protocol import MAX_LAYERS
from burnish.sandbox.state.layers import (
    MAX_DEPTH,
    SQUASH_DEPTH,
    LayerTable,
    Squash,
    squash_start,
)


def test_the_table_and_the_helper_agree_on_the_depth() -> None:
    assert MAX_DEPTH == MAX_LAYERS
    assert SQUASH_DEPTH < MAX_DEPTH


class LayerLife(RuleBasedStateMachine):
    """Snapshot, fork, rollback, drop and squash in any order, against what the stacks must show."""

    holds = Bundle("holds")

    def __init__(self) -> None:
        super().__init__()
        self.table = LayerTable()
        self.shown: dict[int, tuple[int, ...]] = {}
        self.content: dict[int, tuple[int, ...]] = {}
        self.dropped: set[int] = set()
        self.jobs: list[Squash] = []

    def drop(self, layers: list[int]) -> None:
        assert not self.dropped & set(layers), "dropped twice"
        assert len(set(layers)) == len(layers)
        self.dropped |= set(layers)

    @rule(target=holds)
    def create(self) -> int:
        hold = self.table.acquire()
        self.shown[hold] = ()
        return hold

    @rule(hold=holds, times=st.integers(1, 6))
    def snapshot(self, hold: int, times: int) -> None:
        for _ in range(times):
            if self.table.is_full(hold):
                return
            layer = self.table.new()
            self.content[layer] = (layer,)
            self.table.push(hold, layer)
            self.shown[hold] += (layer,)

    @rule(hold=holds)
    def an_empty_snapshot_costs_nothing(self, hold: int) -> None:
        alive = self.table.alive
        layer = self.table.new()
        self.dropped.add(layer)
        self.table.discard(layer)
        assert self.table.alive == alive

    @rule(target=holds, hold=holds)
    def fork(self, hold: int) -> int:
        child = self.table.fork(hold)
        self.shown[child] = self.shown[hold]
        return child

    @rule(hold=holds, other=holds)
    def roll_back(self, hold: int, other: int) -> None:
        self.drop(self.table.rollback(hold, other))
        self.shown[hold] = self.shown[other]

    @rule(hold=consumes(holds))
    def release(self, hold: int) -> None:
        self.drop(self.table.release(hold))
        del self.shown[hold]

    @rule(hold=holds)
    def begin(self, hold: int) -> None:
        job = self.table.begin_squash(hold)
        if job is not None:
            self.content[job.layer] = sum((self.content[layer] for layer in job.run), ())
            self.jobs.append(job)

    @rule(data=st.data(), well=st.booleans())
    def end(self, data: st.DataObject, well: bool) -> None:
        if self.jobs:
            job = self.jobs.pop(data.draw(st.integers(0, len(self.jobs) - 1)))
            self.drop(self.table.end_squash(job) if well else self.table.abandon_squash(job))

    @invariant()
    def every_hold_shows_what_it_stands_for(self) -> None:
        for hold, shown in self.shown.items():
            stack = self.table.stack(hold)
            assert len(stack) <= MAX_DEPTH
            assert sum((self.content[layer] for layer in stack), ()) == shown

    @invariant()
    def what_is_alive_is_what_is_needed(self) -> None:
        needed = {layer for hold in self.shown for layer in self.table.stack(hold)}
        for job in self.jobs:
            needed |= {*job.run, job.layer}
        assert self.table.alive == needed
        assert not needed & self.dropped

    @invariant()
    def every_layer_is_alive_or_was_dropped(self) -> None:
        assert set(self.content) <= self.table.alive | self.dropped

    def teardown(self) -> None:
        for job in self.jobs:
            self.drop(self.table.end_squash(job))
        for hold in list(self.shown):
            self.drop(self.table.release(hold))
        assert not self.table.alive
        assert set(self.content) <= self.dropped


LayerLife.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
test_layers_live_exactly_as_long_as_they_are_needed = LayerLife.TestCase


@given(st.lists(st.integers(0, 2**40), min_size=SQUASH_DEPTH, max_size=MAX_DEPTH))
def test_a_squash_makes_room(weights: list[int]) -> None:
    start = squash_start(weights)
    assert len(weights) - start >= 8
    assert start + 1 <= MAX_DEPTH - 7


def copied_bytes(deltas: Sequence[int]) -> int:
    stack: list[int] = []
    copied = 0
    for delta in deltas:
        stack.append(delta)
        if len(stack) >= SQUASH_DEPTH:
            start = squash_start(stack)
            copied += sum(stack[start:])
            stack[start:] = [sum(stack[start:])]
    return copied


def test_a_large_base_is_not_copied_for_small_changes() -> None:
    assert copied_bytes([50_000_000] + [1000] * 400) < 50_000_000
    assert copied_bytes([1000] * 1000) < 8 * 1000 * 1000


def test_what_is_not_alive_cannot_be_held() -> None:
    table = LayerTable()
    layer = table.new()
    with pytest.raises(ValueError, match="not alive"):
        table.acquire((layer,))
    hold = table.acquire()
    table.push(hold, layer)
    with pytest.raises(ValueError, match="not pending"):
        table.push(hold, layer)
    with pytest.raises(ValueError, match="different"):
        table.acquire((layer, layer))
    assert table.release(hold) == [layer]
    for use in (table.release, table.stack, table.fork, table.begin_squash):
        with pytest.raises(ValueError, match="released"):
            use(hold)


def test_a_full_stack_takes_no_more_until_it_is_squashed() -> None:
    table = LayerTable()
    hold = table.acquire()
    for _ in range(MAX_DEPTH):
        table.push(hold, table.new())
    layer = table.new()
    with pytest.raises(ValueError, match="squash"):
        table.push(hold, layer)
    job = table.begin_squash(hold)
    assert job is not None
    assert table.begin_squash(hold) is None, "one at a time"
    assert set(table.end_squash(job)) == set(job.run)
    table.push(hold, layer)
    assert table.stack(hold) == (job.layer, layer)


def test_a_squash_nobody_needs_any_more_is_dropped_with_its_layers() -> None:
    table = LayerTable()
    hold = table.acquire()
    for _ in range(SQUASH_DEPTH):
        table.push(hold, table.new())
    job = table.begin_squash(hold)
    assert job is not None
    assert not set(table.release(hold)) & set(job.run), "still read by the squash"
    assert set(table.end_squash(job)) == {*job.run, job.layer}
