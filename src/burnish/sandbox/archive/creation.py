"""Make single files in an open directory: with their owner, mode, times and attributes."""

import os
from collections.abc import Iterable

from burnish.sandbox.archive.entry import Entry

_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class Creator:
    """Nothing may be where it makes something. Of entries it takes no paths."""

    def __init__(self, uid_base: int | None, *, readable: bool) -> None:
        """See `tree_writer.Rules`."""
        self._uid_base = uid_base
        self._readable = readable

    def file(
        self, folder: int, name: bytes, entry: Entry, chunks: Iterable[tuple[int, bytes]]
    ) -> None:
        """A regular file with its content as (offset, data)."""
        descriptor = os.open(name, _NEW_FILE, 0o600, dir_fd=folder)
        try:
            end = 0
            for offset, data in chunks:
                _write_all(descriptor, data, offset)
                end = offset + len(data)
            if end != entry.size:
                os.ftruncate(descriptor, entry.size)
            self.own(descriptor, entry.uid, entry.gid)
            for key, value in entry.xattrs.items():
                os.setxattr(descriptor, key, value)
            os.fchmod(descriptor, self.mode(entry.mode, 0o400))
            os.utime(descriptor, ns=(entry.mtime_ns, entry.mtime_ns))
        finally:
            os.close(descriptor)

    def symlink(self, folder: int, name: bytes, entry: Entry) -> None:
        """A symbolic link."""
        os.symlink(entry.target, name, dir_fd=folder)
        self._finish(folder, name, entry)

    def special(self, folder: int, name: bytes, entry: Entry, file_type: int) -> None:
        """A pipe or socket of the type that `stat` gives."""
        os.mknod(name, file_type | 0o600, dir_fd=folder)
        self._finish(folder, name, entry)
        os.chmod(name, entry.mode, dir_fd=folder)

    def own(self, descriptor: int, uid: int, gid: int) -> None:
        """Give an open file to an owner of the tree."""
        if self._uid_base is not None:
            os.fchown(descriptor, self._uid_base + uid, self._uid_base + gid)

    def mode(self, mode: int, needed: int) -> int:
        """Permission bits, with those that its owner needs to read and remove it."""
        return mode | needed if self._readable else mode

    def _finish(self, folder: int, name: bytes, entry: Entry) -> None:
        if self._uid_base is not None:
            uid, gid = self._uid_base + entry.uid, self._uid_base + entry.gid
            os.chown(name, uid, gid, dir_fd=folder, follow_symlinks=False)
        times = (entry.mtime_ns, entry.mtime_ns)
        os.utime(name, ns=times, dir_fd=folder, follow_symlinks=False)


def _write_all(descriptor: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, offset)
        view = view[written:]
        offset += written
