"""Which pages hold which tokens: a radix tree whose edges are the tokens of one page.

    root (weight version, adapter) -> page of tokens -> page of tokens -> ... -> partly filled page

A node stands for all tokens from its root to the end of its page. Whole pages lie in a dictionary
of their parent, so a walk costs one look-up per page: O(prompt), whatever the tree holds. The tree
knows nothing of who reads a page; nodes leave it leaf first, or a whole branch at once. A node that
has left is dead for good: whoever still keeps it can see that, and nothing grows below it.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

# A page that many continuations share may have many children; comparing more than this many costs
# more than the part of a page that it can save.
_MAX_SIBLINGS = 32


class RootKey(NamedTuple):
    """What the tokens were computed with. Nothing is ever matched across two roots."""

    version: int
    """Weight version."""
    adapter: str | None = None
    """LoRA adapter, if any."""


class Node:
    """One page of known content."""

    __slots__ = ("children", "depth", "is_alive", "page", "parent", "partial", "tokens")

    def __init__(self, parent: "Node | None", tokens: tuple[int, ...], page: int) -> None:
        """A root has no parent and the page -1."""
        self.parent, self.tokens, self.page = parent, tokens, page
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.children: dict[tuple[int, ...], Node] = {}
        self.partial: dict[tuple[int, ...], Node] = {}
        self.is_alive = True

    @property
    def is_leaf(self) -> bool:
        """Whether nothing is known to follow."""
        return not self.children and not self.partial

    def path(self) -> list["Node"]:
        """From the first page to this one; empty for a root."""
        nodes, node = [], self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        nodes.reverse()
        return nodes


class PrefixTree:
    """Nodes by content."""

    def __init__(self, page_size: int) -> None:
        """Nothing is known."""
        self.page_size = page_size
        self._roots: dict[RootKey, Node] = {}

    def root(self, key: RootKey) -> Node:
        """Where prefixes of `key` begin."""
        node = self._roots.get(key)
        if node is None:
            node = self._roots[key] = Node(None, (), -1)
        return node

    def walk(self, node: Node, tokens: Sequence[int], limit: int) -> Node:
        """The deepest whole page below `node` that `tokens[:limit]` continues to."""
        size = self.page_size
        start = node.depth * size
        while start + size <= limit:
            child = node.children.get(tuple(tokens[start : start + size]))
            if child is None:
                break
            node, start = child, start + size
        return node

    def longest_part(self, node: Node, tokens: tuple[int, ...]) -> tuple[Node | None, int]:
        """The child of `node` that shares most of its first tokens with `tokens`, and how many."""
        best, most = None, 0
        if not tokens:
            return best, most
        for seen, child in enumerate(_offspring(node)):
            if seen == _MAX_SIBLINGS:
                break
            common = common_length(child.tokens, tokens)
            if common > most:
                best, most = child, common
        return best, most

    def insert(self, parent: Node, tokens: tuple[int, ...], page: int) -> Node:
        """The node of `tokens` below a live `parent`: a new one on `page`, or the one known."""
        assert parent.is_alive
        assert 0 < len(tokens) <= self.page_size
        siblings = self._siblings(parent, tokens)
        known = siblings.get(tokens)
        if known is None:
            known = siblings[tokens] = Node(parent, tokens, page)
        return known

    def remove(self, node: Node) -> None:
        """Forget a leaf."""
        assert node.is_leaf, "a page was dropped while longer prefixes need it"
        self._unlink(node)
        node.is_alive = False

    def cut(self, node: Node) -> list[Node]:
        """Forget a node and all that follows it; returns them."""
        self._unlink(node)
        return _kill(node)

    def clear(self) -> list[Node]:
        """Forget everything; returns all nodes that had a page."""
        nodes = [node for root in self._roots.values() for node in _kill(root)]
        self._roots.clear()
        return [node for node in nodes if node.parent is not None]

    def __iter__(self) -> Iterator[Node]:
        """All nodes that have a page."""
        for root in self._roots.values():
            yield from (node for node in _branch(root) if node.parent is not None)

    def _unlink(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None, "a root does not leave alone"
        del self._siblings(parent, node.tokens)[node.tokens]

    def _siblings(self, parent: Node, tokens: tuple[int, ...]) -> dict[tuple[int, ...], Node]:
        return parent.children if len(tokens) == self.page_size else parent.partial


def _offspring(node: Node) -> Iterator[Node]:
    yield from node.partial.values()
    yield from node.children.values()


def _branch(node: Node) -> Iterator[Node]:
    stack = [node]
    while stack:
        node = stack.pop()
        yield node
        stack.extend(_offspring(node))


def _kill(node: Node) -> list[Node]:
    nodes = list(_branch(node))
    for dead in nodes:
        dead.is_alive = False
        # Parents and children refer to each other: freed at once, not by the cycle collector.
        dead.children, dead.partial = {}, {}
    return nodes


def common_length(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the longest common prefix."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return min(len(a), len(b))
