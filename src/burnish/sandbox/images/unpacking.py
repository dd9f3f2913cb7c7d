"""A directory, or a plain tar, as the tree of an image."""

import os
from pathlib import Path
from typing import BinaryIO, NamedTuple

from burnish.sandbox.archive.beneath import FOLDER
from burnish.sandbox.archive.copying import NodeCopier
from burnish.sandbox.archive.digest import kept_mode
from burnish.sandbox.archive.entry import ArchiveLimits, EntryKind, box_id, show
from burnish.sandbox.archive.tar_reader import TarReader
from burnish.sandbox.archive.tree_writer import Rules, TreeWriter
from burnish.sandbox.archive.walk import NodeKind, walk
from burnish.sandbox.archive.whiteouts import is_marked


class Unpacked(NamedTuple):
    """What came in."""

    num_entries: int = 0
    """Members read."""
    data_bytes: int = 0
    """Content read."""
    num_dropped: int = 0
    """Devices, pipes and sockets that were left out."""

    def plus(self, other: "Unpacked") -> "Unpacked":
        """Both together."""
        return Unpacked(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))


def image_rules() -> Rules:
    """Root keeps owners; for others everything belongs to the caller, who must be able to read."""
    root = os.geteuid() == 0
    return Rules(uid_base=0 if root else None, follow=True, readable=not root)


def unpack_tar(stream: BinaryIO, tree_fd: int, limits: ArchiveLimits) -> Unpacked:
    """Unpack a plain tar into an empty directory.

    Raises:
        ValueError: it is hostile, damaged, beyond a limit, or a layer with whiteouts.
    """
    reader = TarReader(stream, limits)
    writer = TreeWriter(tree_fd, image_rules())
    dropped = 0
    try:
        for entry in reader:
            if is_marked(entry.path):
                raise ValueError(f"{show(entry.path)} is a whiteout: this is a layer, not an image")
            if entry.kind is EntryKind.SPECIAL:
                dropped += 1
            elif entry.path:
                writer.add(entry, reader.chunks())
        writer.finish()
    finally:
        writer.close()
    return Unpacked(reader.num_entries, reader.data_bytes, dropped)


def copy_directory(source: Path, tree_fd: int, limits: ArchiveLimits) -> Unpacked:
    """Copy a directory, without what is mounted in it.

    Raises:
        ValueError: it is beyond a limit.
        OSError: it cannot be read; EXDEV if another file system is mounted in it, ESTALE if it
            changes meanwhile.
    """
    writer = TreeWriter(tree_fd, image_rules())
    copier = NodeCopier(writer)
    entries = copied = dropped = 0
    top = os.open(source, FOLDER & ~os.O_NOFOLLOW)
    try:
        for node in walk([top], overlay=False):
            entries += 1
            if entries > limits.num_entries or copied > limits.data_bytes:
                raise ValueError(f"more than {limits.num_entries:,} names or too much content")
            if node.kind is NodeKind.SPECIAL:
                dropped += 1
                continue
            status = node.status
            owner = (box_id(status.st_uid), box_id(status.st_gid))
            copied += copier.add(node, kept_mode(status.st_mode), *owner)
        writer.finish()
    finally:
        writer.close()
        os.close(top)
    return Unpacked(entries, copied, dropped)
