"""Several layers as one: what lies below them stays hidden or visible as before."""

import os
import stat
from collections.abc import Sequence

from burnish.sandbox.archive.copying import NodeCopier
from burnish.sandbox.archive.entry import Entry, EntryKind
from burnish.sandbox.archive.tree_writer import Rules, TreeWriter
from burnish.sandbox.archive.walk import Node, NodeKind, walk

# Boxes cannot make devices, so a device in a layer is none of theirs.
_KEPT_TYPES = (stat.S_IFIFO, stat.S_IFSOCK)


def squash(layer_fds: Sequence[int], into_fd: int) -> None:
    """Copy frozen layers (lowest first), merged, into an empty layer.

    Times, owners, modes, holes, hard links and attributes are kept; pipes and sockets too.

    Raises:
        ValueError: a path is too long.
        OSError: as the file system says; ENOSPC if the layer is full. Throw it away then.
    """
    rules = Rules(uid_base=0 if os.geteuid() == 0 else None, follow=False, readable=False)
    writer = TreeWriter(into_fd, rules)
    copier = NodeCopier(writer)
    try:
        for node in walk(layer_fds, overlay=True):
            if node.kind is NodeKind.WHITEOUT:
                writer.whiteout(node.path)
            elif node.kind is NodeKind.SPECIAL:
                _copy_special(node, writer)
            else:
                status = node.status
                copier.add(node, stat.S_IMODE(status.st_mode), status.st_uid, status.st_gid)
            if node.opaque:
                writer.opaque(node.path)
        writer.finish()
    finally:
        writer.close()


def _copy_special(node: Node, writer: TreeWriter) -> None:
    status = node.status
    file_type = stat.S_IFMT(status.st_mode)
    if file_type in _KEPT_TYPES:
        entry = Entry(
            path=node.path,
            kind=EntryKind.SPECIAL,
            mode=stat.S_IMODE(status.st_mode),
            uid=status.st_uid,
            gid=status.st_gid,
            mtime_ns=status.st_mtime_ns,
        )
        writer.add_special(entry, file_type)
