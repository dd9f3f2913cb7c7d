r"""Sequences in and out of the cache: page bookkeeping and tensors, changed together.

match -> start -> grow, index (every step) -> finish
             \-> preempt -> restore           pages wait in host memory
                       \-> start             or are computed again
"""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any, Protocol

from burnish.rollout.engine.limits import CoreLimits
from burnish.rollout.engine.long.eviction import drops
from burnish.rollout.engine.pages import Match, PagePool, Pin
from burnish.rollout.engine.plan import may_admit, may_swap
from burnish.rollout.engine.radix import RootKey
from burnish.rollout.engine.sequence import Saved, Sequence


class PageStore(Protocol):
    """What residency needs of a key/value cache."""

    @property
    def num_bytes_per_page(self) -> int:
        """Keys and values of all layers."""
        ...

    def copy_page(self, source: int, target: int) -> None:
        """Copy one page in every layer."""
        ...

    def save_pages(self, pages: Seq[int]) -> Any:
        """Copy pages into host memory."""
        ...

    def load_pages(self, saved: Any, pages: Seq[int]) -> None:
        """Put saved pages into these, in order."""
        ...

    def clear_pages(self, pages: Seq[int]) -> None:
        """Make the content finite."""
        ...


class Residency:
    """Who is in the cache."""

    def __init__(
        self, store: PageStore, limits: CoreLimits, *, version: int, flops_per_token: float
    ) -> None:
        """An empty cache for weights `version`.

        `flops_per_token` of a forward decide between host memory and computing again.
        """
        self._store: PageStore | None = store
        self.limits = limits
        self._flops_per_token = flops_per_token
        self.pool = PagePool(limits.num_pages, limits.page_size)
        self.saved_bytes = 0
        self._pinned: dict[int, tuple[tuple[int, ...], str | None]] = {}
        self._pins: dict[int, Pin] = {}
        self._version = version

    @property
    def store(self) -> PageStore:
        """The tensors."""
        assert self._store is not None, "the cache sleeps"
        return self._store

    def attach(self, store: PageStore | None) -> None:
        """Exchange the tensors, while nobody holds a page; None gives their memory back."""
        assert self.pool.room == self.pool.num_pages
        assert self.saved_bytes == 0
        self.pool.forget()
        self.pool.take_dirty(range(self.pool.num_pages))
        self._store = store

    def match(self, sequence: Sequence) -> Match:
        """The longest known prefix of a sequence that holds nothing yet.

        The last token is always computed: its hidden state gives the next one. A prompt whose
        log-probs are asked for is computed from its beginning: they are never taken from a cache.
        """
        start = sequence.match_from
        if start is None or not start.is_alive:
            adapter = sequence.adapter and sequence.adapter.key
            start = self.pool.root(RootKey(self._version, adapter))
        is_whole = sequence.wants_prompt or self.limits.kv.evicts
        limit = 0 if is_whole else len(sequence.tokens) - 1
        match = self.pool.match(start, sequence.tokens, limit)
        sequence.match_from = match.node
        return match

    def fits(self, sequence: Sequence, match: Match, num_running: int) -> bool:
        """Whether it can start now."""
        return may_admit(
            new_pages=self._pages_at_first(sequence) - match.num_pages,
            locked_pages=match.num_locked,
            room=self.pool.room,
            num_running=num_running,
            max_running=self.limits.max_running,
        )

    def may_restore(self, sequence: Sequence, num_running: int) -> bool:
        """Whether pages in host memory can come back now."""
        return may_admit(
            new_pages=self.pool.pages_for(len(sequence.tokens)) - len(sequence.pages),
            locked_pages=0,
            room=self.pool.room,
            num_running=num_running,
            max_running=self.limits.max_running,
        )

    def start(self, sequence: Sequence, match: Match) -> None:
        """Share the matched pages and take the others that its known tokens need."""
        pool, shared = self.pool, match.pages
        held = shared if match.tail_page is None else [*shared, match.tail_page]
        for page in held:
            pool.share(page)
        sequence.pages = shared
        if self.limits.kv.evicts:
            # What it wrote depends on what it gave back: nobody else may read it.
            sequence.node, sequence.num_indexed_pages = None, 0
            return
        self.grow(sequence, pool.pages_for(len(sequence.tokens)) - match.num_pages)
        if match.tail_page is not None:
            self.store.copy_page(match.tail_page, sequence.pages[match.num_pages])
            pool.release([match.tail_page])
        sequence.node, sequence.num_indexed_pages = match.node, match.num_pages
        sequence.num_computed = match.num_tokens
        if not sequence.num_sampled:
            sequence.cached_tokens = match.num_tokens

    def grow(self, sequence: Sequence, num_pages: int) -> None:
        """Take pages for tokens to come."""
        new = [self.pool.take() for _ in range(num_pages)]
        dirty = self.pool.take_dirty(new)
        if dirty:
            self.store.clear_pages(dirty)
        sequence.pages += new

    def trim(self, sequence: Sequence) -> None:
        """Give back pages beyond those that its known tokens need."""
        needed = self.pool.pages_for(len(sequence.tokens))
        self.pool.release(sequence.pages[needed:])
        del sequence.pages[needed:]

    def index(self, sequence: Sequence, *, with_tail: bool) -> None:
        """Make computed pages known; `with_tail` also the last, partly filled one."""
        node, size = sequence.node, self.limits.page_size
        if node is None or not node.is_alive:
            return
        while (sequence.num_indexed_pages + 1) * size <= sequence.num_computed:
            i = sequence.num_indexed_pages
            node = self.pool.index(
                node, sequence.pages[i], sequence.tokens[i * size : (i + 1) * size]
            )
            # The same tokens may have been computed twice at once: one page is enough.
            sequence.pages[i] = node.page
            sequence.num_indexed_pages += 1
        sequence.node = node
        start = sequence.num_indexed_pages * size
        if with_tail and start < sequence.num_computed:
            tail = sequence.tokens[start : sequence.num_computed]
            self.pool.index(node, sequence.pages[sequence.num_indexed_pages], tail)

    def adopt(
        self, tokens: tuple[int, ...], adapter: str | None, write: Callable[[list[int]], None]
    ) -> int:
        """Keep a prefix that was computed elsewhere; how many of its tokens there was room for.

        `write` fills the pages that it is given with the first tokens.
        """
        size, pool = self.limits.page_size, self.pool
        pages = [pool.take() for _ in range(min(len(tokens) // size, pool.room))]
        self.store.clear_pages(pool.take_dirty(pages))
        write(pages)
        node = pool.root(RootKey(self._version, adapter))
        for i, page in enumerate(pages):
            node = pool.index(node, page, tokens[i * size : (i + 1) * size])
            pages[i] = node.page
        pool.release(pages)
        return len(pages) * size

    def finish(self, sequence: Sequence) -> None:
        """It ended: give back what it holds, here or in host memory."""
        self._drop_saved(sequence)
        self.pool.release(sequence.held_pages)
        sequence.pages = []

    def thin(self, sequence: Sequence, num_tokens: int) -> None:
        """Give back the pages that the policy drops after a step of `num_tokens`."""
        policy = self.limits.kv
        if not policy.evicts:
            return
        dropped = drops(
            policy,
            self.limits.page_size,
            [i for i, page in enumerate(sequence.pages) if page >= 0],
            num_computed=sequence.num_computed,
            num_prompt=sequence.num_prompt,
            before=sequence.num_computed - num_tokens,
            mass=sequence.page_mass,
        )
        self.pool.release([sequence.pages[i] for i in dropped])
        for i in dropped:
            sequence.pages[i] = -1

    def preempt(self, sequence: Sequence) -> bool:
        """Give its pages back; whether they went to host memory."""
        if self.limits.kv.evicts:
            self.drop(sequence)
            return False
        shared = 0
        while shared < len(sequence.pages) and self.pool.ref_count(sequence.pages[shared]) > 1:
            shared += 1
        size = self.limits.page_size
        # What others hold as well frees nothing, so it is kept.
        private = sequence.pages[shared : self.pool.pages_for(sequence.num_computed)]
        num_bytes = len(private) * self.store.num_bytes_per_page
        if not private or not may_swap(
            num_tokens=sequence.num_computed - shared * size,
            num_bytes=num_bytes,
            flops_per_token=self._flops_per_token,
            room_bytes=self.limits.swap_bytes - self.saved_bytes,
        ):
            self.drop(sequence)
            return False
        sequence.saved = Saved(self.store.save_pages(private), len(private))
        self.saved_bytes += num_bytes
        self.pool.release(sequence.pages[shared:])
        sequence.pages = sequence.pages[:shared]
        node = sequence.node
        assert node is not None
        while node.is_alive and node.depth > shared:
            assert node.parent is not None
            node = node.parent
        sequence.node, sequence.num_indexed_pages = node, min(shared, node.depth)
        return True

    def restore(self, sequence: Sequence) -> None:
        """Bring its pages back from host memory."""
        assert sequence.saved is not None
        saved, first = sequence.saved, len(sequence.pages)
        self.grow(sequence, self.pool.pages_for(len(sequence.tokens)) - first)
        self.store.load_pages(saved.content, sequence.pages[first : first + saved.num_pages])
        self._drop_saved(sequence)
        self.index(sequence, with_tail=False)

    def drop(self, sequence: Sequence) -> None:
        """Give back everything; it will be computed again."""
        self.finish(sequence)
        sequence.rewind()

    def spoil(self, sequence: Sequence) -> None:
        """It ended in numbers that are none: nobody may read what it wrote."""
        self.pool.spoil(sequence.held_pages)
        self.finish(sequence)
        self.renew_pins()

    def forget(self, version: int) -> None:
        """From now on nothing matches what was computed until now; weights are `version`."""
        self._version = version
        self.pool.forget()
        self._pins.clear()
        self.renew_pins()

    def pin(self, tokens: tuple[int, ...], adapter: str | None) -> int:
        """Spare a prefix from eviction, over weight updates too; returns a number for `unpin`."""
        number = max(self._pinned, default=0) + 1
        self._pinned[number] = (tokens, adapter)
        self.renew_pins()
        return number

    def rename(self, old: str, new: str) -> None:
        """Pins of an adapter go on with its newer weights."""
        for number, (tokens, adapter) in self._pinned.items():
            if adapter == old:
                self._pinned[number] = (tokens, new)
                pin = self._pins.pop(number, None)
                if pin is not None:
                    self.pool.unpin(pin)
        self.renew_pins()

    def unpin(self, number: int) -> None:
        """Leave the prefix to eviction again. Unknown numbers are ignored."""
        self._pinned.pop(number, None)
        pin = self._pins.pop(number, None)
        if pin is not None:
            self.pool.unpin(pin)

    def unpin_all(self, adapter: str) -> None:
        """Leave all pinned prefixes of an adapter to eviction."""
        for number in [n for n, (_, owner) in self._pinned.items() if owner == adapter]:
            self.unpin(number)

    def yield_pins(self) -> None:
        """Give pinned pages back until they are computed anew: a request cannot run otherwise."""
        for pin in self._pins.values():
            self.pool.unpin(pin)
        self._pins.clear()

    @property
    def num_pinned_pages(self) -> int:
        """Pages that pins hold, alone or with sequences."""
        return sum(len(pin.pages) for pin in self._pins.values())

    def renew_pins(self) -> None:
        """Hold again what pins had to give up, as far as it is known."""
        for number, (tokens, adapter) in self._pinned.items():
            pin = self._pins.get(number)
            if pin is not None and pin.node.is_alive:
                continue
            if pin is not None:
                self.pool.unpin(pin)
            root = self.pool.root(RootKey(self._version, adapter))
            self._pins[number] = self.pool.pin(root, tokens)

    def _pages_at_first(self, sequence: Sequence) -> int:
        """Pages that a waiting sequence needs to get through its prompt."""
        limits = self.limits
        length = len(sequence.tokens)
        return limits.kv.most_pages(length, length, limits.budget_tokens, limits.page_size)

    def _drop_saved(self, sequence: Sequence) -> None:
        if sequence.saved is not None:
            self.saved_bytes -= sequence.saved.num_pages * self.store.num_bytes_per_page
            sequence.saved = None
