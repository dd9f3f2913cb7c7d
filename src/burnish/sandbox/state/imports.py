"""A tar of any origin as a layer."""

import os
from collections.abc import Sequence
from pathlib import Path

from burnish.core.errors import UserError
from burnish.sandbox.archive.compression import open_archive
from burnish.sandbox.archive.entry import ArchiveLimits, Entry, EntryKind, show
from burnish.sandbox.archive.stop import Stop
from burnish.sandbox.archive.tar_reader import TarReader
from burnish.sandbox.archive.tree_writer import Rules, TreeWriter
from burnish.sandbox.archive.whiteouts import Hidden, read_mark

DEFAULT_LIMITS = ArchiveLimits()
_KERNELS = ("/proc", "/dev")
# Without these folders no command starts in a box, and without these names it has no programs.
_FOLDERS = frozenset({b"dev", b"proc", b"sys", b"tmp", b"work"})
_NEEDED = _FOLDERS | {b"bin", b"etc", b"lib", b"lib64", b"sbin", b"usr"}


def import_tar(
    source: Path,
    into_fd: int,
    uid_base: int,
    limits: ArchiveLimits = DEFAULT_LIMITS,
    below: Path | None = None,
    covered: Sequence[str] = (),
    stop: Stop | None = None,
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
        covered: where the box has files of this host over those of its layers.
        stop: ends it early.

    Raises:
        UserError: it has files where the box would not see them, or takes from the box what it
            needs.
        ValueError: it leads out or through a link, holds a device or pipe, forges a whiteout, is
            damaged, or is beyond a limit.
        OSError: as the file system says; ENOSPC if the layer is full.
        Stopped: `stop` was set.
    """
    uids = uid_base if os.geteuid() == 0 else None
    below_fd = None if below is None else _open_root(below)
    rules = Rules(uid_base=uids, follow=False, readable=False, below_fd=below_fd)
    writer = TreeWriter(into_fd, rules)
    try:
        with open_archive(source) as stream:
            _unpack(TarReader(stream, limits), writer, covered, stop or Stop())
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


def _unpack(reader: TarReader, writer: TreeWriter, covered: Sequence[str], stop: Stop) -> None:
    whiteouts: list[bytes] = []
    opaques: list[bytes] = []
    for entry in stop.among(reader):
        if not entry.path:
            # The top belongs to the box, not to the layer.
            continue
        hidden = read_mark(entry)
        _refuse_covered(entry, entry.path if hidden is None else hidden.path, covered)
        _refuse_loss(entry, hidden)
        if hidden is not None:
            (opaques if hidden.opaque else whiteouts).append(hidden.path)
        elif entry.kind is EntryKind.SPECIAL:
            raise ValueError(f"{show(entry.path)} is a device or pipe")
        else:
            writer.add(entry, stop.among(reader.chunks()))
    # Members of the same archive are never hidden, so marks come last, the deepest first: a
    # directory that also bears a whiteout of its own name then becomes opaque.
    for path in stop.among(opaques):
        if not path:
            raise ValueError("a mark at the top would hide the whole image")
        writer.opaque(path)
    deepest_first = sorted(whiteouts, key=lambda path: path.count(b"/"), reverse=True)
    for path in stop.among(deepest_first):
        writer.whiteout(path)


def _refuse_covered(entry: Entry, path: bytes, covered: Sequence[str]) -> None:
    """What nobody would find in the box must not be lost without a word."""
    for top in covered:
        if _is_in(path, top):
            raise UserError(
                f"{show(entry.path)} would be hidden: a box without an image has {top} of its "
                "host, read-only.",
                fix="use a box with an image (burnish sandbox create --image NAME), or leave "
                f"{top} out of the tar",
            )
    # Root file systems come with empty files there, for others to mount over.
    for top in _KERNELS:
        if entry.size and _is_in(path, top):
            raise UserError(
                f"{show(entry.path)} would be hidden: {top} of a box is the kernel's.",
                fix=f"leave {top} out of the tar",
            )


def _refuse_loss(entry: Entry, hidden: Hidden | None) -> None:
    """What every box needs must not be taken from it for good."""
    if hidden is None:
        lost = entry.path in _FOLDERS and entry.kind is not EntryKind.FOLDER
        top = entry.path
    else:
        lost = hidden.path in _NEEDED and not hidden.opaque
        top = hidden.path
    if lost:
        raise UserError(
            f"{show(entry.path)} would take /{top.decode()} from the box, where nothing would "
            "start any more.",
            fix=f"leave /{top.decode()} out of the tar, or make it a folder there",
        )


def _is_in(path: bytes, top: str) -> bool:
    name = top[1:].encode()
    return path == name or path.startswith(name + b"/")
