"""A tar of any origin as a layer."""

import os
from pathlib import Path

from burnish.sandbox.archive.compression import open_archive
from burnish.sandbox.archive.entry import ArchiveLimits, EntryKind, show
from burnish.sandbox.archive.tar_reader import TarReader
from burnish.sandbox.archive.tree_writer import Rules, TreeWriter
from burnish.sandbox.archive.whiteouts import read_mark

DEFAULT_LIMITS = ArchiveLimits()


def import_tar(
    source: Path,
    into_fd: int,
    uid_base: int,
    limits: ArchiveLimits = DEFAULT_LIMITS,
    below: Path | None = None,
) -> None:
    """Unpack an archive as the upper directory of an overlay with `userxattr`.

    It may be compressed (gzip, bzip2, xz, zstd). `.wh.name` hides `name` of lower layers,
    `.wh..wh..opq` all of a directory, wherever they stand in the archive. Owners are shifted by
    `uid_base` (an ordinary user owns all), set-id bits removed. After an error the layer is half
    made: throw it away.

    Args:
        source: the archive.
        into_fd: an empty directory.
        uid_base: owner on this host of what belongs to 0 in the box.
        limits: what it may hold at most.
        below: root of what the layer comes to lie on, whose directories keep owner and mode where
            the archive does not name them; `/work` and `/tmp` in any case.

    Raises:
        ValueError: it leads out or through a link, holds a device or pipe, forges a whiteout, is
            damaged, or is beyond a limit.
        OSError: as the file system says; ENOSPC if the layer is full.
    """
    uids = uid_base if os.geteuid() == 0 else None
    below_fd = None if below is None else _open_root(below)
    rules = Rules(uid_base=uids, follow=False, readable=False, below_fd=below_fd)
    writer = TreeWriter(into_fd, rules)
    try:
        with open_archive(source) as stream:
            _unpack(TarReader(stream, limits), writer)
        writer.finish()
    finally:
        writer.close()
        if below_fd is not None:
            os.close(below_fd)


def _open_root(path: Path) -> int | None:
    """The root of a box; None where the kernel keeps an ordinary user from looking into it."""
    try:
        return os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except PermissionError:
        return None


def _unpack(reader: TarReader, writer: TreeWriter) -> None:
    whiteouts: list[bytes] = []
    opaques: list[bytes] = []
    for entry in reader:
        if not entry.path:
            # The top belongs to the box, not to the layer.
            continue
        hidden = read_mark(entry)
        if hidden is not None:
            (opaques if hidden.opaque else whiteouts).append(hidden.path)
        elif entry.kind is EntryKind.SPECIAL:
            raise ValueError(f"{show(entry.path)} is a device or pipe")
        else:
            writer.add(entry, reader.chunks())
    # Members of the same archive are never hidden, so marks come last, the deepest first: a
    # directory that also bears a whiteout of its own name then becomes opaque.
    for path in opaques:
        if not path:
            raise ValueError("a mark at the top would hide the whole image")
        writer.opaque(path)
    for path in sorted(whiteouts, key=lambda path: path.count(b"/"), reverse=True):
        writer.whiteout(path)
