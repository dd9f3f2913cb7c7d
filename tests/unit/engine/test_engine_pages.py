"""The page pool: nothing leaks, nothing is shared that differs."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from burnish.rollout.engine.pages import PagePool, common_length

SIZE = 3
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=12)


class Holder:
    """A sequence as the engine would run it: writes tokens into pages, indexes, releases."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens, self.pages = tokens, []
        self.num_indexed, self.node = 0, 0
        self.indexable = True


class PoolMachine(RuleBasedStateMachine):
    """A pool beside a model: what each page was last written with, and under which root."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(10, SIZE)
        self.content: dict[int, list[int]] = {p: [] for p in range(10)}
        self.epoch_of: dict[int, int] = {}
        self.epoch = 0
        self.holders: list[Holder] = []

    @rule(tokens=TOKENS)
    def start(self, tokens: list[int]) -> None:
        match = self.pool.match(tokens, len(tokens) - 1)
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
        if not holder.indexable:
            return
        while (holder.num_indexed + 1) * SIZE <= len(holder.tokens):
            i = holder.num_indexed
            holder.node = self.pool.index(
                holder.node, holder.pages[i], holder.tokens[i * SIZE : (i + 1) * SIZE]
            )
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
        self.content[last] = [*self.content[last], token]
        self.index(holder)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        holder = data.draw(st.sampled_from(self.holders))
        self.holders.remove(holder)
        self.pool.release(holder.pages)

    @rule()
    def publish(self) -> None:
        self.pool.forget()
        self.epoch += 1
        for holder in self.holders:
            holder.indexable = False

    @invariant()
    def sound(self) -> None:
        self.pool.check([holder.pages for holder in self.holders])

    def teardown(self) -> None:
        for holder in self.holders:
            self.pool.release(holder.pages)
        self.pool.check([])
        assert self.pool.room == 10


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def fill(pool: PagePool, tokens: list[int]) -> list[int]:
    pages, node = [], pool.root
    for start in range(0, len(tokens), pool.page_size):
        pages.append(pool.take())
        node = pool.index(node, pages[-1], tokens[start : start + pool.page_size])
    return pages


def test_a_released_prefix_is_found_again_up_to_the_limit() -> None:
    pool = PagePool(8, 4)
    pages = fill(pool, list(range(10)))
    pool.release(pages)
    match = pool.match([*range(10), 99], 10)
    assert match.pages == tuple(pages[:2])
    assert (match.tail_page, match.tail_tokens, match.num_tokens) == (pages[2], 2, 10)
    assert pool.match(list(range(10)), 7).num_tokens == 7
    assert pool.room == 8


def test_the_least_recently_used_leaf_goes_first() -> None:
    pool = PagePool(4, 2)
    old, new = fill(pool, [1, 2, 3, 4]), fill(pool, [5, 6, 7, 8])
    pool.release(old)
    pool.release(new)
    assert pool.take() == old[1]
    assert pool.match([1, 2, 3, 4], 4).num_tokens == 2
    assert pool.match([5, 6, 7, 8], 4).num_tokens == 4


def test_forgetting_makes_idle_pages_free_and_unknown() -> None:
    pool = PagePool(4, 2)
    pool.release(fill(pool, [1, 2, 3]))
    pool.forget()
    assert pool.match([1, 2, 3], 3).num_tokens == 0
    assert pool.room == 4


def test_the_same_tokens_under_another_parent_do_not_match() -> None:
    pool = PagePool(4, 2)
    fill(pool, [1, 2, 3, 4])
    assert pool.match([3, 4], 2).num_tokens == 0


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
