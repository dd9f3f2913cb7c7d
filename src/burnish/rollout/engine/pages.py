"""Who holds which page of the key/value cache.

Bookkeeping only: no tensors. A page is in exactly one of three states:

    free   nobody uses it, its content means nothing
    idle   nobody uses it, but the tree knows its content: reusable until it is needed (LRU)
    held   `ref_count` > 0 sequences or pins read it; content up to what was indexed never changes

Whoever holds a page in the tree holds every page before it as well. So no page becomes idle after
its predecessor: the least recently used idle page is always a leaf of the tree.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from burnish.rollout.engine.radix import Node, PrefixTree, RootKey


class Match(NamedTuple):
    """The longest known prefix of a token sequence."""

    node: Node
    """Tree node at the end of the whole pages."""
    tail_page: int | None
    """A page whose first `tail_tokens` tokens continue the prefix: to be copied, not shared."""
    tail_tokens: int
    """Usable tokens of `tail_page`."""
    num_tokens: int
    """Tokens covered by pages and tail."""
    num_idle: int
    """How many of the whole pages are idle, and would leave the room when shared."""
    is_tail_idle: bool
    """Whether the tail page is idle, and leaves the room while it is copied."""

    @property
    def pages(self) -> list[int]:
        """Whole pages, in order."""
        return [node.page for node in self.node.path()]

    @property
    def num_pages(self) -> int:
        """Whole pages."""
        return self.node.depth

    @property
    def num_locked(self) -> int:
        """Pages that leave the room, beside those that must be taken."""
        return self.num_idle + self.is_tail_idle

    def without_tail(self) -> "Match":
        """The whole pages only."""
        tokens = self.num_tokens - self.tail_tokens
        return self._replace(tail_page=None, tail_tokens=0, num_tokens=tokens, is_tail_idle=False)


class Pin:
    """A prefix that eviction spares: its whole pages are held as soon as they are known."""

    def __init__(self, node: Node, tokens: Sequence[int]) -> None:
        """Nothing held yet."""
        self.node, self.tokens = node, tuple(tokens)
        self.pages: list[int] = []


class PagePool:
    """Page allocation, reference counts, the prefix tree and its pins."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        """All pages free, nothing indexed."""
        assert num_pages > 0
        assert page_size > 0
        self.num_pages, self.page_size = num_pages, page_size
        self._free = list(range(num_pages - 1, -1, -1))
        self._ref_counts = [0] * num_pages
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._node_of: dict[int, Node] = {}
        self._tree = PrefixTree(page_size)
        self._pins: list[Pin] = []
        self._dirty: set[int] = set()

    @property
    def room(self) -> int:
        """Pages that `take` can hand out: free and idle."""
        return len(self._free) + len(self._idle)

    @property
    def num_idle(self) -> int:
        """Pages that only the tree keeps."""
        return len(self._idle)

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold `num_tokens` tokens."""
        return -(-num_tokens // self.page_size)

    def root(self, key: RootKey) -> Node:
        """Where prefixes of `key` begin."""
        return self._tree.root(key)

    def match(self, start: Node, tokens: Sequence[int], limit: int) -> Match:
        """Longest known prefix of `tokens[:limit]`. Changes nothing.

        Args:
            start: a root, or a live node that an earlier match of the same tokens ended at.
            tokens: all tokens.
            limit: only these many may be matched.
        """
        node = self._tree.walk(start, tokens, limit)
        begin = node.depth * self.page_size
        part = tuple(tokens[begin : min(begin + self.page_size, limit)])
        tail, tail_tokens = self._tree.longest_part(node, part)
        tail_page = None if tail is None else tail.page
        return Match(
            node=node,
            tail_page=tail_page,
            tail_tokens=tail_tokens,
            num_tokens=begin + tail_tokens,
            num_idle=self._num_idle_above(node),
            is_tail_idle=tail_page in self._idle,
        )

    def take(self) -> int:
        """A page with reference count 1, the least recently used idle one if none is free."""
        assert self.room > 0, "take() without room: the plan was wrong"
        if self._free:
            page = self._free.pop()
        else:
            page, _ = self._idle.popitem(last=False)
            self._tree.remove(self._node_of.pop(page))
        self._ref_counts[page] = 1
        return page

    def take_dirty(self, pages: Iterable[int]) -> list[int]:
        """Those of `pages` that hold rubbish and must be cleared before use; asked once."""
        dirty = [page for page in pages if page in self._dirty]
        self._dirty.difference_update(dirty)
        return dirty

    def ref_count(self, page: int) -> int:
        """How many hold it."""
        return self._ref_counts[page]

    def is_free(self, page: int) -> bool:
        """Whether its content means nothing any more."""
        return self._ref_counts[page] == 0 and page not in self._node_of

    def share(self, page: int) -> None:
        """One more reader of an indexed page."""
        assert self._ref_counts[page] > 0 or page in self._idle
        self._idle.pop(page, None)
        self._ref_counts[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """One reader less of each page. Later pages become reclaimable before earlier ones."""
        for page in reversed(pages):
            assert self._ref_counts[page] > 0, "page released twice"
            self._ref_counts[page] -= 1
            if self._ref_counts[page] == 0:
                if page in self._node_of:
                    self._idle[page] = None
                else:
                    self._free.append(page)

    def index(self, parent: Node, page: int, tokens: Sequence[int]) -> Node:
        """Declare the content of a held page; returns the node at its end (`parent` if not full).

        A page that is not full may be declared again when more of it is written. If another page
        is known to hold the same, that one is shared and `page` is given back: go on with the
        node's page. Below a dead parent nothing happens.
        """
        assert self._ref_counts[page] > 0
        if not parent.is_alive:
            return parent
        is_full = len(tokens) == self.page_size
        old = self._node_of.pop(page, None)
        if old is not None:
            self._tree.remove(old)
        node = self._tree.insert(parent, tuple(tokens), page)
        if node.page == page:
            self._node_of[page] = node
        elif is_full:
            self.share(node.page)
            self.release([page])
        if not is_full:
            return parent
        self._extend_pins(node)
        return node

    def pin(self, root: Node, tokens: Sequence[int]) -> Pin:
        """Spare the whole pages of a prefix from eviction, now or once they are known."""
        pin = Pin(root, tokens)
        node = self._tree.walk(root, pin.tokens, len(pin.tokens))
        for known in node.path():
            self.share(known.page)
            pin.pages.append(known.page)
        pin.node = node
        self._pins.append(pin)
        return pin

    def unpin(self, pin: Pin) -> None:
        """Leave the prefix to eviction. A pin that is gone already is left alone."""
        if pin in self._pins:
            self._pins.remove(pin)
            self.release(pin.pages)

    def forget(self) -> None:
        """Drop the whole tree and all pins: what follows can match nothing written before."""
        for pin in list(self._pins):
            self.unpin(pin)
        self._tree.clear()
        self._node_of.clear()
        self._free.extend(self._idle)
        self._idle.clear()

    def spoil(self, pages: Sequence[int]) -> None:
        """Never match these pages or what follows them, and have them cleared before reuse."""
        for page in pages:
            self._dirty.add(page)
            node = self._node_of.get(page)
            if node is None:
                continue
            for dead in self._tree.cut(node):
                del self._node_of[dead.page]
                self._dirty.add(dead.page)
                if dead.page in self._idle:
                    del self._idle[dead.page]
                    self._free.append(dead.page)

    def check(self, held: Sequence[Sequence[int]]) -> None:
        """Assert every invariant, given the page lists of all live sequences."""
        counts = [0] * self.num_pages
        for pages in (*held, *(pin.pages for pin in self._pins)):
            for page in pages:
                counts[page] += 1
        assert counts == self._ref_counts, "reference counts do not match the page tables"
        states = self._free + list(self._idle) + [p for p, n in enumerate(counts) if n]
        assert sorted(states) == list(range(self.num_pages)), "a page is lost or in two states"
        nodes = list(self._tree)
        assert {node.page: node for node in nodes} == self._node_of
        assert len(nodes) == len(self._node_of)
        assert all(node.is_alive for node in nodes)
        assert all(page in self._node_of for page in self._idle)
        assert not any(page in self._node_of for page in self._free)
        for node in nodes:
            parent = node.parent
            if parent is not None and parent.parent is not None:
                assert counts[parent.page] >= counts[node.page], "a page is held without its prefix"

    def _num_idle_above(self, node: Node) -> int:
        """Idle pages on the way to `node`: they are the last ones, since prefixes are held too."""
        count = 0
        while node.parent is not None and node.page in self._idle:
            count += 1
            node = node.parent
        return count

    def _extend_pins(self, node: Node) -> None:
        start = (node.depth - 1) * self.page_size
        for pin in self._pins:
            if pin.node is node.parent:
                wanted = pin.tokens[start : start + self.page_size]
                if wanted == node.tokens:
                    self.share(node.page)
                    pin.pages.append(node.page)
                    pin.node = node
