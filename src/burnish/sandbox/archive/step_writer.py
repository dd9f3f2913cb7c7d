"""Build a tree in step with a walk through another one, however deep."""

import os
from collections.abc import Iterable
from typing import NamedTuple

from burnish.sandbox.archive.beneath import FOLDER, climb, identity_of
from burnish.sandbox.archive.creation import Creator
from burnish.sandbox.archive.entry import Entry, EntryKind
from burnish.sandbox.archive.tree_writer import make_opaque, make_whiteout


class _Above(NamedTuple):
    identity: tuple[int, int]
    """Of the directory from which we came."""
    folder: Entry
    """What the present one shall be like when all is in it."""


class StepWriter:
    """A `Companion` of `walk`: what is added lies in the directory where the walk is.

    One descriptor at a time. Nobody else may change the tree meanwhile.
    """

    def __init__(self, root_fd: int, creator: Creator) -> None:
        """Begin in an empty directory, which stays open and belongs to the caller."""
        self.folder_fd = os.dup(root_fd)
        """The present directory."""
        self._creator = creator
        self._trail: list[_Above] = []
        # Directories get their modes and times when they are left: modes may forbid us to write,
        # and writing changes times.
        self._to_enter: dict[bytes, Entry] = {}
        self._levels: list[dict[bytes, Entry]] = []

    def enter(self, name: bytes) -> None:
        """See `Companion`."""
        folder = self._to_enter.pop(name)
        self._trail.append(_Above(identity_of(self.folder_fd), folder))
        self._replace(os.open(name, FOLDER, dir_fd=self.folder_fd))
        self._levels.append(self._to_enter)
        self._to_enter = {}

    def leave(self) -> None:
        """See `Companion`."""
        above = self._trail.pop()
        parent = climb(self.folder_fd, above.identity)
        done = self.folder_fd
        self.folder_fd = parent
        self._to_enter = self._levels.pop()
        try:
            os.fchmod(done, self._creator.mode(above.folder.mode, 0o700))
            os.utime(done, ns=(above.folder.mtime_ns, above.folder.mtime_ns))
        finally:
            os.close(done)

    def add(self, entry: Entry, chunks: Iterable[tuple[int, bytes]] = ()) -> None:
        """Make a file, directory or symbolic link, whose path is its name alone."""
        if entry.kind is EntryKind.FILE:
            self._creator.file(self.folder_fd, entry.path, entry, chunks)
        elif entry.kind is EntryKind.FOLDER:
            self._add_folder(entry)
        else:
            assert entry.kind is EntryKind.SYMLINK
            self._creator.symlink(self.folder_fd, entry.path, entry)

    def add_special(self, entry: Entry, file_type: int) -> None:
        """Make a pipe or socket of the type that `stat` gives."""
        self._creator.special(self.folder_fd, entry.path, entry, file_type)

    def whiteout(self, name: bytes) -> None:
        """Hide what lower layers have of this name."""
        make_whiteout(self.folder_fd, name)

    def opaque(self, name: bytes) -> None:
        """Hide what lower layers have in the directory of this name."""
        folder = os.open(name, FOLDER, dir_fd=self.folder_fd)
        try:
            make_opaque(folder)
        finally:
            os.close(folder)

    def close(self) -> None:
        """Close what is open."""
        os.close(self.folder_fd)

    def _add_folder(self, entry: Entry) -> None:
        os.mkdir(entry.path, 0o700, dir_fd=self.folder_fd)
        folder = os.open(entry.path, FOLDER, dir_fd=self.folder_fd)
        try:
            for key, value in entry.xattrs.items():
                os.setxattr(folder, key, value)
            self._creator.own(folder, entry.uid, entry.gid)
        finally:
            os.close(folder)
        self._to_enter[entry.path] = entry

    def _replace(self, descriptor: int) -> None:
        os.close(self.folder_fd)
        self.folder_fd = descriptor
