"""The page pool: nothing leaks, nothing is shared that differs."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from burnish.rollout.engine.pages import Match, PagePool, Pin
from burnish.rollout.engine.radix import Node, RootKey, common_length

SIZE = 3
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=12)


class Holder:
    """A sequence as the engine would run it: writes tokens into pages, indexes, releases."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens, self.pages = tokens, []
        self.num_indexed, self.node = 0, None


class PoolMachine(RuleBasedStateMachine):
    """A pool beside a model: what each page was last written with, and under which root."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(10, SIZE)
        self.content: dict[int, list[int]] = {p: [] for p in range(10)}
        self.epoch_of: dict[int, int] = {}
        self.epoch = 0
        self.holders: list[Holder] = []
        self.pins: list[Pin] = []

    @property
    def root(self) -> Node:
        return self.pool.root(RootKey(self.epoch))

    @rule(tokens=TOKENS)
    def start(self, tokens: list[int]) -> None:
        match = self.pool.match(self.root, tokens, len(tokens) - 1)
        self.check_match(match, tokens)
        new = self.pool.pages_for(len(tokens)) - len(match.pages)
        if new + match.num_locked > self.pool.room:
            return
        held = [*match.pages, *([] if match.tail_page is None else [match.tail_page])]
        for page in held:
            self.pool.share(page)
        holder = Holder(tokens)
        holder.pages = [*match.pages, *(self.pool.take() for _ in range(new))]
        assert match.tail_page not in holder.pages, "a page to copy from was handed out"
        if match.tail_page is not None:
            self.pool.release([match.tail_page])
        holder.node, holder.num_indexed = match.node, len(match.pages)
        for i in range(len(match.pages), len(holder.pages)):
            page = holder.pages[i]
            self.content[page] = tokens[i * SIZE : (i + 1) * SIZE]
            self.epoch_of[page] = self.epoch
        self.index(holder)
        self.holders.append(holder)

    def check_match(self, match: object, tokens: list[int]) -> None:
        for i, page in enumerate(match.pages):
            assert self.content[page] == tokens[i * SIZE : (i + 1) * SIZE]
            assert self.epoch_of[page] == self.epoch
        if match.tail_page is not None:
            rest = tokens[len(match.pages) * SIZE :]
            assert match.tail_tokens > 0
            assert self.content[match.tail_page][: match.tail_tokens] == rest[: match.tail_tokens]
            assert self.epoch_of[match.tail_page] == self.epoch

    def index(self, holder: Holder) -> None:
        if not holder.node.is_alive:
            return
        while (holder.num_indexed + 1) * SIZE <= len(holder.tokens):
            i = holder.num_indexed
            holder.node = self.pool.index(
                holder.node, holder.pages[i], holder.tokens[i * SIZE : (i + 1) * SIZE]
            )
            # What was computed twice is kept once.
            holder.pages[i] = holder.node.page
            holder.num_indexed += 1
        tail = holder.tokens[holder.num_indexed * SIZE :]
        if tail:
            self.pool.index(holder.node, holder.pages[holder.num_indexed], tail)

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), token=st.integers(0, 1))
    def grow(self, data: st.DataObject, token: int) -> None:
        holder = data.draw(st.sampled_from(self.holders))
        if len(holder.tokens) % SIZE == 0:
            if self.pool.room == 0:
                return
            page = self.pool.take()
            self.content[page], self.epoch_of[page] = [], self.epoch
            holder.pages.append(page)
        holder.tokens = [*holder.tokens, token]
        last = holder.pages[-1]
        assert self.pool.ref_count(last) == 1, "a shared page is written"
        self.content[last] = [*self.content[last], token]
        self.index(holder)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        holder = data.draw(st.sampled_from(self.holders))
        self.holders.remove(holder)
        self.pool.release(holder.pages)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def break_down(self, data: st.DataObject) -> None:
        holder = data.draw(st.sampled_from(self.holders))
        self.holders.remove(holder)
        self.pool.spoil(holder.pages)
        for page in holder.pages:
            self.epoch_of[page] = -1
        self.pool.release(holder.pages)

    @rule(tokens=TOKENS)
    def pin(self, tokens: list[int]) -> None:
        if len(self.pins) < 3:
            self.pins.append(self.pool.pin(self.root, tokens))

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        pin = data.draw(st.sampled_from(self.pins))
        self.pins.remove(pin)
        self.pool.unpin(pin)

    @rule()
    def publish(self) -> None:
        self.pool.forget()
        self.pins.clear()
        self.epoch += 1

    @invariant()
    def sound(self) -> None:
        self.pool.check([holder.pages for holder in self.holders])

    @invariant()
    def pinned_pages_hold_their_prefix(self) -> None:
        for pin in self.pins:
            for i, page in enumerate(pin.pages):
                assert self.pool.ref_count(page) > 0
                if pin.node.is_alive:
                    assert self.content[page] == list(pin.tokens[i * SIZE : (i + 1) * SIZE])

    def teardown(self) -> None:
        for holder in self.holders:
            self.pool.release(holder.pages)
        for pin in self.pins:
            self.pool.unpin(pin)
        self.pool.check([])
        assert self.pool.room == 10


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


KEY = RootKey(0)


def fill(pool: PagePool, tokens: list[int], key: RootKey = KEY) -> list[int]:
    pages, node = [], pool.root(key)
    for start in range(0, len(tokens), pool.page_size):
        page = pool.take()
        node = pool.index(node, page, tokens[start : start + pool.page_size])
        full = start + pool.page_size <= len(tokens)
        pages.append(node.page if full else page)
    return pages


def found(pool: PagePool, tokens: list[int], limit: int, key: RootKey = KEY) -> Match:
    return pool.match(pool.root(key), tokens, limit)


@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=14), max_size=12), TOKENS)
def test_the_tree_finds_what_a_table_of_all_prefixes_finds(
    known: list[list[int]], asked: list[int]
) -> None:
    pool = PagePool(200, SIZE)
    table: set[tuple[int, ...]] = set()
    for tokens in known:
        fill(pool, tokens)
        table |= {tuple(tokens[:end]) for end in range(len(tokens) + 1)}
    best = max(end for end in range(len(asked) + 1) if tuple(asked[:end]) in table or end == 0)
    match = found(pool, asked, len(asked))
    assert match.num_tokens == best
    assert match.num_pages == best // SIZE
    # Going on from a known place finds the same as from the root.
    again = pool.match(found(pool, asked, len(asked) // 2).node, asked, len(asked))
    assert again.node is match.node


def test_a_released_prefix_is_found_again_up_to_the_limit() -> None:
    pool = PagePool(8, 4)
    pages = fill(pool, list(range(10)))
    pool.release(pages)
    match = found(pool, [*range(10), 99], 10)
    assert match.pages == pages[:2]
    assert (match.tail_page, match.tail_tokens, match.num_tokens) == (pages[2], 2, 10)
    assert found(pool, list(range(10)), 7).num_tokens == 7
    assert pool.room == 8


def test_the_least_recently_used_leaf_goes_first() -> None:
    pool = PagePool(4, 2)
    old, new = fill(pool, [1, 2, 3, 4]), fill(pool, [5, 6, 7, 8])
    pool.release(old)
    pool.release(new)
    assert pool.take() == old[1]
    assert found(pool, [1, 2, 3, 4], 4).num_tokens == 2
    assert found(pool, [5, 6, 7, 8], 4).num_tokens == 4


def test_a_pin_outlives_what_evicts_everything_else() -> None:
    pool = PagePool(4, 2)
    pin = pool.pin(pool.root(KEY), [1, 2, 3, 4, 5])
    pool.release(fill(pool, [1, 2, 3, 4]))
    assert pool.room == 2
    others = [pool.take(), pool.take()]
    assert found(pool, [1, 2, 3, 4], 4).num_tokens == 4
    pool.release(others)
    pool.unpin(pin)
    pool.unpin(pin)
    assert pool.room == 4


def test_the_same_tokens_computed_twice_are_kept_once() -> None:
    pool = PagePool(6, 2)
    first, second = fill(pool, [1, 2, 3, 4]), fill(pool, [1, 2, 3, 4])
    assert first == second
    assert pool.room == 4
    pool.check([first, second])


def test_forgetting_makes_idle_pages_free_and_unknown() -> None:
    pool = PagePool(4, 2)
    pool.release(fill(pool, [1, 2, 3]))
    pool.forget()
    assert found(pool, [1, 2, 3], 3).num_tokens == 0
    assert pool.room == 4


def test_spoiled_pages_and_their_continuations_are_unknown_and_dirty() -> None:
    pool = PagePool(6, 2)
    long = fill(pool, [1, 2, 3, 4, 5, 6])
    pool.release(long[2:])
    pool.spoil(long[1:2])
    assert found(pool, [1, 2, 3, 4, 5, 6], 6).num_tokens == 2
    pool.release(long[:2])
    pool.check([])
    taken = [pool.take() for _ in range(6)]
    assert set(pool.take_dirty(taken)) == set(long[1:])
    assert pool.take_dirty(taken) == []


@pytest.mark.parametrize("other", [RootKey(1), RootKey(0, "adapter")])
def test_nothing_matches_across_versions_or_adapters(other: RootKey) -> None:
    pool = PagePool(4, 2)
    fill(pool, [1, 2, 3, 4])
    assert found(pool, [1, 2, 3, 4], 4, other).num_tokens == 0


def test_the_same_tokens_under_another_parent_do_not_match() -> None:
    pool = PagePool(4, 2)
    fill(pool, [1, 2, 3, 4])
    assert found(pool, [3, 4], 2).num_tokens == 0


def test_taking_from_an_exhausted_pool_and_releasing_twice_are_our_bugs() -> None:
    pool = PagePool(1, 2)
    page = pool.take()
    with pytest.raises(AssertionError):
        pool.take()
    pool.release([page])
    with pytest.raises(AssertionError):
        pool.release([page])


def test_common_length_stops_at_the_first_difference() -> None:
    assert common_length([1, 2, 3], [1, 2, 4, 5]) == 2
    assert common_length([], [1]) == 0
    assert common_length([1, 2], [1, 2, 3]) == 2
