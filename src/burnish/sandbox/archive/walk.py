"""A tree, or layers of an overlay merged into one, as nodes in one fixed order.

The order is: a directory's children by name (bytes), then each child directory likewise. So parents
come before what they hold, and equal trees give equal sequences, whatever the file system's order.

What a layer hides of the layers below it follows overlayfs: a whiteout is a device 0/0 or an empty
file with `user.overlay.whiteout`; a directory hides its namesakes below if it is opaque, or if
something that is no directory lies between them.
"""

import contextlib
import errno
import os
import stat
from collections.abc import Iterator, Sequence
from enum import StrEnum
from typing import NamedTuple

from burnish.sandbox.archive.beneath import FOLDER, open_beneath
from burnish.sandbox.archive.entry import MAX_PATH_BYTES, Extent, kept_xattr, show
from burnish.sandbox.archive.tree_writer import OPAQUE, WHITEOUT

_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
_CHUNK = 256 * 2**10


class NodeKind(StrEnum):
    """What a node is."""

    FILE = "file"
    """A regular file."""
    FOLDER = "folder"
    """A directory."""
    SYMLINK = "symlink"
    """A symbolic link."""
    WHITEOUT = "whiteout"
    """Hides what lies below the lowest layer."""
    SPECIAL = "special"
    """A device, pipe or socket."""


class Node(NamedTuple):
    """One name of a tree. Its descriptor is valid until the next node is asked for."""

    path: bytes
    """From the top, without a leading `/`."""
    kind: NodeKind
    """What it is."""
    status: os.stat_result
    """Of the topmost layer that has it."""
    opaque: bool
    """For a directory: hides what lies below the lowest layer."""
    folder_fd: int
    """The directory that holds it, in that layer."""
    name: bytes
    """Its name in there."""

    @property
    def identity(self) -> tuple[int, int] | None:
        """Equal for names of one file; None if it has no other name."""
        many = self.kind is not NodeKind.FOLDER and self.status.st_nlink > 1
        return (self.status.st_dev, self.status.st_ino) if many else None

    def open(self) -> int:
        """A descriptor of a file or directory.

        Raises:
            OSError: it changed since it was seen.
        """
        flags = FOLDER if self.kind is NodeKind.FOLDER else _READ
        descriptor = os.open(self.name, flags, dir_fd=self.folder_fd)
        status = os.fstat(descriptor)
        if (status.st_dev, status.st_ino) != (self.status.st_dev, self.status.st_ino):
            os.close(descriptor)
            raise OSError(errno.ESTALE, "changed while it was read", os.fsdecode(self.name))
        return descriptor

    def target(self) -> bytes:
        """What a symbolic link says."""
        return os.readlink(self.name, dir_fd=self.folder_fd)


class _Pending(NamedTuple):
    path: bytes
    layers: tuple[int, ...]
    hidden: bool


class _Found(NamedTuple):
    kind: NodeKind
    status: os.stat_result
    layer: int


def walk(layer_fds: Sequence[int], *, overlay: bool) -> Iterator[Node]:
    """Every name below the top.

    Args:
        layer_fds: directories, lowest first; nothing may change in them meanwhile.
        overlay: whether they are upper directories of an overlay; else plain, and only one.

    Raises:
        ValueError: a path is too long.
        OSError: something cannot be read.
    """
    assert overlay or len(layer_fds) == 1
    pending = [_Pending(b"", tuple(reversed(layer_fds)), hidden=False)]
    while pending:
        folder = pending.pop()
        if len(folder.path) > MAX_PATH_BYTES:
            raise ValueError(f"directories are too deep: {show(folder.path)}")
        with contextlib.ExitStack() as stack:
            opened: dict[int, int] = {}
            for layer in folder.layers:
                opened[layer] = open_beneath(layer, folder.path)
                stack.callback(os.close, opened[layer])
            below: list[_Pending] = []
            for node, inner in _children(folder, opened, overlay):
                yield node
                if inner is not None:
                    below.append(inner)
            pending += reversed(below)


def _children(
    folder: _Pending, opened: dict[int, int], overlay: bool
) -> Iterator[tuple[Node, _Pending | None]]:
    holders: dict[bytes, list[int]] = {}
    for layer, descriptor in opened.items():
        for text in os.listdir(descriptor):
            holders.setdefault(os.fsencode(text), []).append(layer)
    for name in sorted(holders):
        found = (_look(opened[layer], name, layer, overlay) for layer in holders[name])
        top = next(found)
        path = folder.path + b"/" + name if folder.path else name
        inner = None
        opaque = False
        if top.kind is NodeKind.FOLDER:
            layers, opaque = _merged(top, found, opened, name, overlay)
            inner = _Pending(path, layers, folder.hidden or opaque)
        elif top.kind is NodeKind.WHITEOUT and folder.hidden:
            continue
        # In a directory that hides all below it, a second mark says nothing.
        hides = opaque and not folder.hidden
        yield Node(path, top.kind, top.status, hides, opened[top.layer], name), inner


def _merged(
    top: _Found, lower: Iterator[_Found], opened: dict[int, int], name: bytes, overlay: bool
) -> tuple[tuple[int, ...], bool]:
    """The layers whose directories show through each other, and whether the last one hides."""
    layers = [top.layer]
    if overlay and _is_opaque(opened[top.layer], name):
        return (top.layer,), True
    for found in lower:
        if found.kind is not NodeKind.FOLDER:
            return tuple(layers), True
        layers.append(found.layer)
        if _is_opaque(opened[found.layer], name):
            return tuple(layers), True
    return tuple(layers), False


def _look(folder_fd: int, name: bytes, layer: int, overlay: bool) -> _Found:
    status = os.lstat(name, dir_fd=folder_fd)
    mode = status.st_mode
    if stat.S_ISDIR(mode):
        kind = NodeKind.FOLDER
    elif stat.S_ISLNK(mode):
        kind = NodeKind.SYMLINK
    elif stat.S_ISREG(mode):
        marked = overlay and not status.st_size and _has_mark(folder_fd, name)
        kind = NodeKind.WHITEOUT if marked else NodeKind.FILE
    elif overlay and stat.S_ISCHR(mode) and status.st_rdev == 0:
        kind = NodeKind.WHITEOUT
    else:
        kind = NodeKind.SPECIAL
    return _Found(kind, status, layer)


def _has_mark(folder_fd: int, name: bytes) -> bool:
    descriptor = os.open(name, _READ, dir_fd=folder_fd)
    try:
        return WHITEOUT in _all_xattrs(descriptor)
    finally:
        os.close(descriptor)


def _is_opaque(folder_fd: int, name: bytes) -> bool:
    descriptor = os.open(name, FOLDER, dir_fd=folder_fd)
    try:
        # "x" means: may hold whiteouts of the second kind. It does not hide.
        return OPAQUE in _all_xattrs(descriptor) and os.getxattr(descriptor, OPAQUE) == b"y"
    finally:
        os.close(descriptor)


def _all_xattrs(descriptor: int) -> list[str]:
    try:
        return os.listxattr(descriptor)
    except OSError as error:
        if error.errno == errno.ENOTSUP:
            return []
        raise


def read_xattrs(descriptor: int) -> dict[str, bytes]:
    """The extended attributes of a file or directory that are content."""
    names = sorted(name for name in _all_xattrs(descriptor) if kept_xattr(name))
    return {name: os.getxattr(descriptor, name) for name in names}


def read_extents(descriptor: int, size: int) -> tuple[Extent, ...]:
    """Where a file has data; a file without holes has one extent."""
    extents = []
    position = 0
    while position < size:
        try:
            start = os.lseek(descriptor, position, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:
                break
            raise
        position = min(os.lseek(descriptor, start, os.SEEK_HOLE), size)
        if start < position:
            extents.append(Extent(start, position - start))
    return tuple(extents)


def read_chunks(descriptor: int, extents: Sequence[Extent]) -> Iterator[tuple[int, bytes]]:
    """Content as (offset, data).

    Raises:
        OSError: ESTALE if the file got shorter.
    """
    for offset, length in extents:
        while length:
            data = os.pread(descriptor, min(length, _CHUNK), offset)
            if not data:
                raise OSError(errno.ESTALE, "changed while it was read")
            yield offset, data
            offset += len(data)
            length -= len(data)
