"""Who owns which page of the key/value cache, and which pages hold a known prefix.

Bookkeeping only: no tensors. A page is in exactly one of three states:

    free   nobody uses it, its content means nothing
    idle   nobody uses it, but the index knows its content: reusable until it is needed (LRU)
    held   `ref_count` > 0 sequences read it; content up to what was indexed never changes

The index is a tree. A node stands for one weight version and all tokens up to the end of a page;
node numbers are never reused, so an evicted parent makes its descendants unreachable, not wrong.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

# A page that many continuations share may have many children; comparing more than this many costs
# more than the part of a page that it can save.
_MAX_SIBLINGS = 32


class Match(NamedTuple):
    """The longest known prefix of a token sequence."""

    pages: tuple[int, ...]
    """Whole pages, in order."""
    node: int
    """Tree node at the end of `pages`."""
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
    def num_locked(self) -> int:
        """Pages that leave the room, beside those that must be taken."""
        return self.num_idle + self.is_tail_idle

    def without_tail(self) -> "Match":
        """The whole pages only."""
        tokens = self.num_tokens - self.tail_tokens
        return self._replace(tail_page=None, tail_tokens=0, num_tokens=tokens, is_tail_idle=False)


class _Entry(NamedTuple):
    parent: int
    tokens: tuple[int, ...]


class PagePool:
    """Page allocation, reference counts and the prefix index."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        """All pages free, nothing indexed."""
        assert num_pages > 0
        assert page_size > 0
        self.num_pages, self.page_size = num_pages, page_size
        self._free = list(range(num_pages - 1, -1, -1))
        self._ref_counts = [0] * num_pages
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._entries: dict[int, _Entry] = {}
        self._children: dict[int, dict[int, tuple[int, ...]]] = {}
        self._nodes: dict[_Entry, tuple[int, int]] = {}
        self._next_node = 1
        self.root = 0

    @property
    def room(self) -> int:
        """Pages that `take` can hand out: free and idle."""
        return len(self._free) + len(self._idle)

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold `num_tokens` tokens."""
        return -(-num_tokens // self.page_size)

    def match(self, tokens: Sequence[int], limit: int) -> Match:
        """Longest known prefix of `tokens[:limit]`. Changes nothing."""
        size, node = self.page_size, self.root
        pages: list[int] = []
        while (len(pages) + 1) * size <= limit:
            start = len(pages) * size
            found = self._nodes.get(_Entry(node, tuple(tokens[start : start + size])))
            if found is None:
                break
            node = found[0]
            pages.append(found[1])
        start = len(pages) * size
        tail_page, tail_tokens = self._tail(node, tuple(tokens[start : min(start + size, limit)]))
        return Match(
            pages=tuple(pages),
            node=node,
            tail_page=tail_page,
            tail_tokens=tail_tokens,
            num_tokens=start + tail_tokens,
            num_idle=sum(page in self._idle for page in pages),
            is_tail_idle=tail_page in self._idle,
        )

    def take(self) -> int:
        """A page with reference count 1, the least recently used idle one if none is free."""
        assert self.room > 0, "take() without room: the plan was wrong"
        if self._free:
            page = self._free.pop()
        else:
            page, _ = self._idle.popitem(last=False)
            self._unindex(page)
        self._ref_counts[page] = 1
        return page

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
                if page in self._entries:
                    self._idle[page] = None
                else:
                    self._free.append(page)

    def index(self, parent: int, page: int, tokens: Sequence[int]) -> int:
        """Declare the content of a held page; returns the node at its end (`parent` if not full).

        A page that is not full may be declared again when more of it is written.
        """
        assert self._ref_counts[page] > 0
        entry = _Entry(parent, tuple(tokens))
        assert 0 < len(entry.tokens) <= self.page_size
        known = self._nodes.get(entry)
        if known is not None:
            if known[1] != page:
                self._unindex(page)
            return known[0]
        self._unindex(page)
        self._entries[page] = entry
        self._children.setdefault(parent, {})[page] = entry.tokens
        if len(entry.tokens) < self.page_size:
            return parent
        node, self._next_node = self._next_node, self._next_node + 1
        self._nodes[entry] = (node, page)
        return node

    def forget(self) -> None:
        """Drop the whole index: what follows can match nothing that was written before."""
        self._free.extend(self._idle)
        self._idle.clear()
        self._entries.clear()
        self._children.clear()
        self._nodes.clear()
        self.root, self._next_node = self._next_node, self._next_node + 1

    def check(self, held: Sequence[Sequence[int]]) -> None:
        """Assert every invariant, given the page lists of all live sequences."""
        counts = [0] * self.num_pages
        for pages in held:
            for page in pages:
                counts[page] += 1
        assert counts == self._ref_counts, "reference counts do not match the page tables"
        states = self._free + list(self._idle) + [p for p, n in enumerate(counts) if n]
        assert sorted(states) == list(range(self.num_pages)), "a page is lost or in two states"
        assert all(page in self._entries for page in self._idle)
        assert not any(page in self._entries for page in self._free)
        listed = {page for children in self._children.values() for page in children}
        assert listed == set(self._entries)
        assert all(self._entries[page] == entry for entry, (_, page) in self._nodes.items())

    def _tail(self, node: int, tokens: tuple[int, ...]) -> tuple[int | None, int]:
        best_page, best = None, 0
        for seen, (page, known) in enumerate(self._children.get(node, {}).items()):
            if seen == _MAX_SIBLINGS:
                break
            common = common_length(known, tokens)
            if common > best:
                best_page, best = page, common
        return best_page, best

    def _unindex(self, page: int) -> None:
        entry = self._entries.pop(page, None)
        if entry is None:
            return
        siblings = self._children[entry.parent]
        del siblings[page]
        if not siblings:
            del self._children[entry.parent]
        found = self._nodes.get(entry)
        if found is not None and found[1] == page:
            del self._nodes[entry]


def common_length(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the longest common prefix."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return min(len(a), len(b))
