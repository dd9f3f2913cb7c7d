"""Layers of a box as one tar in the form of an OCI layer, and their digest."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from burnish.core.disk import replacing
from burnish.core.errors import UserError
from burnish.sandbox.archive.digest import TreeDigest, kept_mode, relative_id, tree_digest
from burnish.sandbox.archive.entry import (
    MAX_PATH_BYTES,
    ArchiveLimits,
    Entry,
    EntryKind,
    show,
)
from burnish.sandbox.archive.stop import Stop
from burnish.sandbox.archive.tar_writer import TarWriter
from burnish.sandbox.archive.walk import (
    Node,
    NodeKind,
    read_chunks,
    read_extents,
    read_xattrs,
    walk,
)
from burnish.sandbox.archive.whiteouts import OPAQUE_NAME, PREFIX, is_marked


def digest(layer_fds: Sequence[int], uid_base: int) -> str:
    """What layers show, merged, as one digest; equal to that of `export_layers`.

    Times, holes, hard links and special files (devices, pipes, sockets) do not count.

    Args:
        layer_fds: upper directories of an overlay with `userxattr`, lowest first, frozen.
        uid_base: owner on this host of what belongs to 0 in the box.

    Raises:
        ValueError: a path is too long.
    """
    return tree_digest(layer_fds, uid_base, overlay=True)


def export_layers(
    layer_fds: Sequence[int], destination: Path, uid_base: int, stop: Stop | None = None
) -> str:
    """Write layers, merged, as one tar: equal files and times give equal bytes.

    Owners are those in the box, set-id bits are removed. Devices, pipes and sockets are left out,
    since no archive restores them. The file is replaced in one step.

    Args:
        layer_fds: as for `digest`.
        destination: the archive; its directory must exist.
        uid_base: as for `digest`.
        stop: ends it early.

    Returns:
        The content digest.

    Raises:
        ValueError: a name starts with `.wh.`, which in this form would delete files elsewhere.
        DiskFullError: an old file at `destination` is untouched.
        UserError: what is there is no regular file, or a path in the box is longer than archives
            hold.
        Stopped: `stop` was set; an old file is untouched.
    """
    with replacing(destination) as file:
        writer = TarWriter(file, ArchiveLimits().header_bytes)
        return _write(layer_fds, writer, uid_base, stop or Stop())


def _write(layer_fds: Sequence[int], writer: TarWriter, uid_base: int, stop: Stop) -> str:
    result = TreeDigest(uid_base)
    names: dict[tuple[int, int], bytes] = {}
    for node in walk(layer_fds, overlay=True):
        if node.kind is NodeKind.SPECIAL:
            continue
        stop.check()
        _check_depth(node)
        if is_marked(node.name):
            raise ValueError(f"an archive of layers cannot hold the name {show(node.path)}")
        result.add(node)
        folder = node.path[: len(node.path) - len(node.name)]
        if node.kind is NodeKind.WHITEOUT:
            path = folder + PREFIX + node.name
            writer.add(Entry(path=path, kind=EntryKind.FILE, mode=0))
            continue
        _add(node, writer, uid_base, names, stop)
        if node.opaque:
            mark = node.path + b"/" + OPAQUE_NAME
            writer.add(Entry(path=mark, kind=EntryKind.FILE, mode=0))
    writer.finish()
    return result.hexdigest()


def _check_depth(node: Node) -> None:
    # A mark beside it or in it needs a few bytes more.
    longest = PREFIX + node.name + b"/" + OPAQUE_NAME
    if node.place.join(longest) is None:
        raise UserError(
            f"{show(node.name)} lies {node.place.depth:,} directories deep in the box: its path "
            f"has more than the {MAX_PATH_BYTES:,} bytes that archives hold.",
            fix="remove it in the box and export again; snapshots and forks keep it as it is",
        )


def _add(
    node: Node,
    writer: TarWriter,
    uid_base: int,
    names: dict[tuple[int, int], bytes],
    stop: Stop,
) -> None:
    status = node.status
    entry = Entry(
        path=node.path,
        kind=EntryKind(node.kind.value),
        mode=kept_mode(status.st_mode),
        uid=relative_id(status.st_uid, uid_base),
        gid=relative_id(status.st_gid, uid_base),
        mtime_ns=status.st_mtime_ns,
    )
    if node.identity is not None:
        first = names.setdefault(node.identity, node.path)
        if first != node.path:
            # The time is that of the first name; a fraction here would cost a header of its own.
            whole_s = entry.mtime_ns // 10**9 * 10**9
            writer.add(entry._replace(kind=EntryKind.HARDLINK, target=first, mtime_ns=whole_s))
            return
    if node.kind is NodeKind.SYMLINK:
        writer.add(entry._replace(target=node.target()))
        return
    descriptor = node.open()
    try:
        entry = entry._replace(xattrs=read_xattrs(descriptor))
        if node.kind is NodeKind.FOLDER:
            writer.add(entry)
        else:
            _add_file(descriptor, entry, writer, stop)
    finally:
        os.close(descriptor)


def _add_file(descriptor: int, entry: Entry, writer: TarWriter, stop: Stop) -> None:
    size = os.fstat(descriptor).st_size
    extents = read_extents(descriptor, size)
    holes = sum(extent.length for extent in extents) < size
    entry = entry._replace(size=size, extents=extents if holes else None)
    writer.add(entry, _data(stop.among(read_chunks(descriptor, extents))))


def _data(chunks: Iterator[tuple[int, bytes]]) -> Iterator[bytes]:
    return (data for _, data in chunks)
