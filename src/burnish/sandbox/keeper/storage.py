"""The files of one box: sized file systems in memory, mounted in the keeper's namespace only."""

import os
import shutil
from pathlib import Path
from typing import Protocol

from burnish.core.boxes import Limits
from burnish.sandbox.archive.beneath import FOLDER
from burnish.sandbox.archive.removal import remove_tree
from burnish.sandbox.keeper.namespace import Identity, mount_tmpfs, resize_tmpfs, unmount

_SHM = "shm"
_FOLDERS = ("work", "tmp", _SHM)


class BoxFiles(Protocol):
    """What holds the files of one box."""

    path: Path
    """With directories `work`, `tmp` and `shm`, as whoever mounts them knows it."""
    work_fd: int
    """Of `work`."""

    def resize(self, limits: Limits) -> bool:
        """Set the room; True if what was mounted from here before must be mounted anew.

        Raises:
            OSError: EINVAL if more is in use.
        """
        ...

    def used_bytes(self) -> int:
        """In memory, all of it."""
        ...

    def is_full(self) -> bool:
        """Whether no space or no inode is left somewhere."""
        ...

    def close(self) -> None:
        """Free everything."""
        ...


class Storage:
    """Directories `work`, `tmp` and `shm` on one file system; `shm` on its own if it has a size."""

    def __init__(self, path: Path, identity: Identity | None) -> None:
        """Make it.

        Raises:
            OSError: the host is out of something.
        """
        self.path = path
        self._identity = identity
        self._applied: tuple[int, int | None] = (Limits().disk_bytes, None)
        self._shm_bytes: int | None = None
        path.mkdir(mode=0o711)
        mount_tmpfs(str(path), size_bytes=self._applied[0], mode=0o711)
        for folder in _FOLDERS:
            (path / folder).mkdir(mode=0o755)
            if identity is not None:
                os.chown(path / folder, identity.uid, identity.gid)
        self.work_fd = os.open(path / "work", os.O_RDONLY | os.O_DIRECTORY)

    def resize(self, limits: Limits) -> bool:
        """Set the room; True if what was mounted from here before must be mounted anew.

        Shared memory that once had a size keeps the last one that was asked for.

        Raises:
            OSError: EINVAL if more is in use.
        """
        wanted = (limits.disk_bytes, limits.num_inodes)
        if wanted != self._applied:
            resize_tmpfs(str(self.path), *wanted)
            self._applied = wanted
        if limits.shm_bytes in (None, self._shm_bytes):
            return False
        shm = self.path / _SHM
        is_new = self._shm_bytes is None
        if is_new:
            self._empty_shm()
            mount_tmpfs(str(shm), size_bytes=limits.shm_bytes, mode=0o755, owner=self._identity)
        else:
            resize_tmpfs(str(shm), limits.shm_bytes)
        self._shm_bytes = limits.shm_bytes
        return is_new

    def used_bytes(self) -> int:
        """In memory, all of it."""
        return sum((room.f_blocks - room.f_bfree) * room.f_frsize for room in self._rooms())

    def is_full(self) -> bool:
        """Whether no space or no inode is left somewhere."""
        return any(room.f_bfree == 0 or room.f_ffree == 0 for room in self._rooms())

    def close(self) -> None:
        """Free everything."""
        os.close(self.work_fd)
        unmount(str(self.path))
        shutil.rmtree(self.path)

    def _rooms(self) -> list[os.statvfs_result]:
        shm = [self.path / _SHM] if self._shm_bytes is not None else []
        return [os.statvfs(path) for path in (self.path, *shm)]

    def _empty_shm(self) -> None:
        """What would be covered would still take room. Nothing of the box runs now."""
        shm_fd = os.open(self.path / _SHM, FOLDER)
        try:
            for name in os.listdir(shm_fd):
                remove_tree(shm_fd, os.fsencode(name))
        finally:
            os.close(shm_fd)
