"""Several layers as one: what lies below them stays hidden or visible as before."""

import os
import stat
from collections.abc import Sequence

from burnish.sandbox.archive.entry import Entry, EntryKind
from burnish.sandbox.archive.tree_writer import Rules, TreeWriter
from burnish.sandbox.archive.walk import (
    Node,
    NodeKind,
    read_chunks,
    read_extents,
    read_xattrs,
    walk,
)


def squash(layer_fds: Sequence[int], into_fd: int) -> None:
    """Copy frozen layers (lowest first), merged, into an empty layer.

    Times, owners, modes, holes, hard links and attributes are kept; pipes and sockets too.

    Raises:
        ValueError: a path is too long.
        OSError: as the file system says; ENOSPC if the layer is full. Throw it away then.
    """
    writer = TreeWriter(
        into_fd, Rules(uid_base=0 if os.geteuid() == 0 else None, follow=False, readable=False)
    )
    names: dict[tuple[int, int], bytes] = {}
    try:
        for node in walk(layer_fds, overlay=True):
            if node.kind is NodeKind.WHITEOUT:
                writer.whiteout(node.path)
                continue
            first = node.path
            if node.identity is not None:
                first = names.setdefault(node.identity, node.path)
            _copy(node, first, writer)
        writer.finish()
    finally:
        writer.close()


def _copy(node: Node, first: bytes, writer: TreeWriter) -> None:
    status = node.status
    entry = Entry(
        path=node.path,
        kind=EntryKind(node.kind.value),
        mode=stat.S_IMODE(status.st_mode),
        uid=status.st_uid,
        gid=status.st_gid,
        mtime_ns=status.st_mtime_ns,
    )
    if first != node.path:
        writer.add(entry._replace(kind=EntryKind.HARDLINK, target=first))
    elif node.kind is NodeKind.SYMLINK:
        writer.add(entry._replace(target=node.target()))
    elif node.kind is NodeKind.SPECIAL:
        # Boxes cannot make devices, so a device here is none of theirs.
        if stat.S_ISFIFO(status.st_mode) or stat.S_ISSOCK(status.st_mode):
            writer.add_special(entry, stat.S_IFMT(status.st_mode))
    else:
        _copy_inside(node, entry, writer)
    if node.opaque:
        writer.opaque(node.path)


def _copy_inside(node: Node, entry: Entry, writer: TreeWriter) -> None:
    descriptor = node.open()
    try:
        entry = entry._replace(xattrs=read_xattrs(descriptor))
        if node.kind is NodeKind.FOLDER:
            writer.add(entry)
            return
        size = os.fstat(descriptor).st_size
        extents = read_extents(descriptor, size)
        writer.add(entry._replace(size=size), read_chunks(descriptor, extents))
    finally:
        os.close(descriptor)
