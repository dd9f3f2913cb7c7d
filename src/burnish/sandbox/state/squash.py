"""Several layers as one: what lies below them stays hidden or visible as before."""

import os
import secrets
import stat
from collections.abc import Sequence

from burnish.sandbox.archive.beneath import FOLDER, open_beneath
from burnish.sandbox.archive.creation import Creator
from burnish.sandbox.archive.entry import Entry, EntryKind
from burnish.sandbox.archive.removal import remove_tree
from burnish.sandbox.archive.step_writer import StepWriter
from burnish.sandbox.archive.stop import Stop
from burnish.sandbox.archive.walk import (
    Node,
    NodeKind,
    read_chunks,
    read_extents,
    read_xattrs,
    walk,
)

# Boxes cannot make devices, so a device in a layer is none of theirs.
_KEPT_TYPES = (stat.S_IFIFO, stat.S_IFSOCK)
_LINKED = (NodeKind.FILE, NodeKind.SYMLINK)


def squash(layer_fds: Sequence[int], into_fd: int, stop: Stop | None = None) -> None:
    """Copy frozen layers (lowest first), merged, into an empty layer: trees of any depth.

    Times, owners, modes, holes, hard links and attributes are kept; pipes and sockets too.

    Args:
        layer_fds: as for `digest`.
        into_fd: an empty directory.
        stop: ends it early.

    Raises:
        OSError: as the file system says; ENOSPC if the layer is full. Throw it away then.
        Stopped: `stop` was set. Throw the layer away.
    """
    stop = stop or Stop()
    creator = Creator(0 if os.geteuid() == 0 else None, readable=False)
    writer = StepWriter(into_fd, creator)
    names = _SharedNames(into_fd, writer)
    try:
        for node in walk(layer_fds, overlay=True, companion=writer):
            stop.check()
            if node.kind is NodeKind.WHITEOUT:
                writer.whiteout(node.name)
            elif node.kind is NodeKind.SPECIAL:
                _copy_special(node, writer)
            elif node.kind not in _LINKED or not names.link(node):
                _copy(node, writer, stop)
                names.learn(node)
            if node.opaque:
                writer.opaque(node.name)
        names.remove()
    finally:
        names.close()
        writer.close()


class _SharedNames:
    """Finds files again that have more than one name.

    Those that no path can say get one more name while the merge lasts, in a directory of our own.
    """

    def __init__(self, into_fd: int, writer: StepWriter) -> None:
        self._top = into_fd
        self._writer = writer
        self._found: dict[tuple[int, int], tuple[bytes, bytes] | bytes] = {}
        # No program could know it while it wrote what is copied here.
        self._folder_name = b".merge-" + secrets.token_hex(16).encode()
        self._folder: int | None = None

    def link(self, node: Node) -> bool:
        """Give the file of an earlier node this name too; False if there was none."""
        if node.identity is None or node.identity not in self._found:
            return False
        where = self._found[node.identity]
        if isinstance(where, bytes):
            self._link(self._own_folder(), where, self._writer.folder_fd, node.name)
            return True
        folder = open_beneath(self._top, where[0])
        try:
            self._link(folder, where[1], self._writer.folder_fd, node.name)
        finally:
            os.close(folder)
        return True

    def learn(self, node: Node) -> None:
        """A node has been copied."""
        if node.identity is None:
            return
        if node.place.path is not None:
            self._found[node.identity] = (node.place.path, node.name)
            return
        own = b"%d" % len(self._found)
        self._link(self._writer.folder_fd, node.name, self._own_folder(), own)
        self._found[node.identity] = own

    def remove(self) -> None:
        """Remove the names of ours."""
        if self._folder is not None:
            remove_tree(self._top, self._folder_name)

    def close(self) -> None:
        """Close what is open."""
        if self._folder is not None:
            os.close(self._folder)

    def _own_folder(self) -> int:
        if self._folder is None:
            os.mkdir(self._folder_name, 0o700, dir_fd=self._top)
            self._folder = os.open(self._folder_name, FOLDER, dir_fd=self._top)
        return self._folder

    def _link(self, source: int, old: bytes, target: int, new: bytes) -> None:
        os.link(old, new, src_dir_fd=source, dst_dir_fd=target, follow_symlinks=False)


def _entry(node: Node, kind: EntryKind) -> Entry:
    status = node.status
    return Entry(
        path=node.name,
        kind=kind,
        mode=stat.S_IMODE(status.st_mode),
        uid=status.st_uid,
        gid=status.st_gid,
        mtime_ns=status.st_mtime_ns,
    )


def _copy(node: Node, writer: StepWriter, stop: Stop) -> None:
    entry = _entry(node, EntryKind(node.kind.value))
    if node.kind is NodeKind.SYMLINK:
        writer.add(entry._replace(target=node.target()))
        return
    descriptor = node.open()
    try:
        entry = entry._replace(xattrs=read_xattrs(descriptor))
        if node.kind is NodeKind.FOLDER:
            writer.add(entry)
            return
        size = os.fstat(descriptor).st_size
        chunks = read_chunks(descriptor, read_extents(descriptor, size))
        writer.add(entry._replace(size=size), stop.among(chunks))
    finally:
        os.close(descriptor)


def _copy_special(node: Node, writer: StepWriter) -> None:
    file_type = stat.S_IFMT(node.status.st_mode)
    if file_type in _KEPT_TYPES:
        writer.add_special(_entry(node, EntryKind.SPECIAL), file_type)
