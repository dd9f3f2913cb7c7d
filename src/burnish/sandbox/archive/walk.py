"""A tree, or layers of an overlay merged into one, as nodes in one fixed order.

The order is: a directory's children by name (bytes), then each child directory likewise. So parents
come before what they hold, and equal trees give equal sequences, whatever the file system's order.

A program can make a tree deeper than any path can say, in no time: so the way goes from directory
to directory, down by name and up by `..`, with one descriptor per layer whatever the depth.

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
from typing import NamedTuple, Protocol

from burnish.sandbox.archive.beneath import FOLDER, climb, identity_of, open_beneath
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

    place: "Place"
    """The directory that holds it, in the tree."""
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
    def path(self) -> bytes:
        """From the top, without a leading `/`.

        Raises:
            ValueError: it is longer than a path may be.
        """
        path = self.place.join(self.name)
        if path is None:
            raise ValueError(
                f"{show(self.name)} lies {self.place.depth:,} directories deep: its path has more "
                f"than {MAX_PATH_BYTES:,} bytes"
            )
        return path

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


class Place(NamedTuple):
    """Where in the tree a directory is."""

    path: bytes | None
    """From the top; None if that is longer than a path may be."""
    depth: int
    """Directories above it."""

    def join(self, name: bytes) -> bytes | None:
        """The path of what it holds; None if that is too long."""
        if self.path is None or len(self.path) + 1 + len(name) > MAX_PATH_BYTES:
            return None
        return self.path + b"/" + name if self.path else name


class Companion(Protocol):
    """Goes through another tree in step with `walk`."""

    def enter(self, name: bytes) -> None:
        """The nodes from now on are in this directory of the present one."""
        ...

    def leave(self) -> None:
        """There are no more nodes in the present directory, nor below it."""
        ...


class _Pending(NamedTuple):
    parent: Place
    name: bytes
    layers: tuple[int, ...]
    hidden: bool


class _Way(NamedTuple):
    """Back up from a directory."""

    layers: tuple[int, ...]
    above: tuple[tuple[int, int], ...]


class _Found(NamedTuple):
    kind: NodeKind
    status: os.stat_result
    layer: int


class _Cursors:
    """One open directory per layer: where the walk is, or was when it last was in that layer."""

    def __init__(self, layer_fds: Sequence[int]) -> None:
        self.fds: list[int] = []
        try:
            self.fds += (os.dup(descriptor) for descriptor in layer_fds)
        except BaseException:
            self.close()
            raise

    def down(self, layers: tuple[int, ...], name: bytes) -> _Way:
        above = []
        for layer in layers:
            above.append(identity_of(self.fds[layer]))
            self._replace(layer, open_beneath(self.fds[layer], name))
        return _Way(layers, tuple(above))

    def up(self, way: _Way) -> None:
        for layer, above in zip(way.layers, way.above, strict=True):
            self._replace(layer, climb(self.fds[layer], above))

    def close(self) -> None:
        for descriptor in self.fds:
            os.close(descriptor)
        self.fds.clear()

    def _replace(self, layer: int, descriptor: int) -> None:
        os.close(self.fds[layer])
        self.fds[layer] = descriptor


def walk(
    layer_fds: Sequence[int], *, overlay: bool, companion: Companion | None = None
) -> Iterator[Node]:
    """Every name below the top, in a tree of any depth.

    Args:
        layer_fds: directories, lowest first; nothing may change in them meanwhile.
        overlay: whether they are upper directories of an overlay; else plain, and only one.
        companion: is told where the walk goes.

    Raises:
        OSError: something cannot be read; ESTALE if it changes meanwhile.
    """
    assert overlay or len(layer_fds) == 1
    all_layers = tuple(reversed(range(len(layer_fds))))
    with contextlib.closing(_Cursors(layer_fds)) as cursors:
        waiting: list[_Pending | _Way] = [_Pending(Place(b"", 0), b"", all_layers, hidden=False)]
        while waiting:
            step = waiting.pop()
            if isinstance(step, _Way):
                cursors.up(step)
                if companion is not None:
                    companion.leave()
                continue
            place = step.parent
            if step.name:
                waiting.append(cursors.down(step.layers, step.name))
                if companion is not None:
                    companion.enter(step.name)
                place = Place(place.join(step.name), place.depth + 1)
            below: list[_Pending] = []
            for node, inner in _children(step, place, cursors.fds, overlay):
                yield node
                if inner is not None:
                    below.append(inner)
            waiting += reversed(below)


def _children(
    folder: _Pending, place: Place, fds: Sequence[int], overlay: bool
) -> Iterator[tuple[Node, _Pending | None]]:
    holders: dict[bytes, list[int]] = {}
    for layer in folder.layers:
        for text in os.listdir(fds[layer]):
            holders.setdefault(os.fsencode(text), []).append(layer)
    for name in sorted(holders):
        found = (_look(fds[layer], name, layer, overlay) for layer in holders[name])
        top = next(found)
        inner = None
        opaque = False
        if top.kind is NodeKind.FOLDER:
            layers, opaque = _merged(top, found, fds, name, overlay)
            inner = _Pending(place, name, layers, folder.hidden or opaque)
        elif top.kind is NodeKind.WHITEOUT and folder.hidden:
            continue
        # In a directory that hides all below it, a second mark says nothing.
        hides = opaque and not folder.hidden
        yield Node(place, top.kind, top.status, hides, fds[top.layer], name), inner


def _merged(
    top: _Found, lower: Iterator[_Found], fds: Sequence[int], name: bytes, overlay: bool
) -> tuple[tuple[int, ...], bool]:
    """The layers whose directories show through each other, and whether the last one hides."""
    layers = [top.layer]
    if overlay and _is_opaque(fds[top.layer], name):
        return (top.layer,), True
    for found in lower:
        if found.kind is not NodeKind.FOLDER:
            return tuple(layers), True
        layers.append(found.layer)
        if _is_opaque(fds[found.layer], name):
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
