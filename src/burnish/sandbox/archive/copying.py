"""Copy nodes of a tree into another one."""

import os

from burnish.sandbox.archive.entry import Entry, EntryKind
from burnish.sandbox.archive.tree_writer import TreeWriter
from burnish.sandbox.archive.walk import (
    Node,
    NodeKind,
    read_chunks,
    read_extents,
    read_xattrs,
)


class NodeCopier:
    """Copies files, directories and links in the order of `walk`; hard links stay links."""

    def __init__(self, writer: TreeWriter) -> None:
        """Copy into what `writer` writes to."""
        self._writer = writer
        self._names: dict[tuple[int, int], bytes] = {}

    def add(self, node: Node, mode: int, uid: int, gid: int) -> int:
        """Copy one node that is no whiteout and not special; returns the bytes of content copied.

        Raises:
            ValueError, OSError: as `TreeWriter.add`; ESTALE if it changed meanwhile.
        """
        entry = Entry(
            path=node.path,
            kind=EntryKind(node.kind.value),
            mode=mode,
            uid=uid,
            gid=gid,
            mtime_ns=node.status.st_mtime_ns,
        )
        if node.identity is not None:
            first = self._names.setdefault(node.identity, node.path)
            if first != node.path:
                self._writer.add(entry._replace(kind=EntryKind.HARDLINK, target=first))
                return 0
        if node.kind is NodeKind.SYMLINK:
            self._writer.add(entry._replace(target=node.target()))
            return 0
        descriptor = node.open()
        try:
            return self._add_inside(node, descriptor, entry)
        finally:
            os.close(descriptor)

    def _add_inside(self, node: Node, descriptor: int, entry: Entry) -> int:
        entry = entry._replace(xattrs=read_xattrs(descriptor))
        if node.kind is NodeKind.FOLDER:
            self._writer.add(entry)
            return 0
        size = os.fstat(descriptor).st_size
        extents = read_extents(descriptor, size)
        self._writer.add(entry._replace(size=size), read_chunks(descriptor, extents))
        return sum(extent.length for extent in extents)
