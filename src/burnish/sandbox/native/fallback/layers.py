"""Writable and frozen layers: file systems of their own, held by the descriptors of their mounts.

u    the overlay's upper directory; of a frozen layer, its files
w    the overlay's work directory
s    /dev/shm of a box whose shared memory counts as disk
"""

from __future__ import annotations

import errno
import os
from typing import NamedTuple, Sequence

from . import kernel
from .users import Users

_ATTRIBUTES = kernel.NO_SETUID | kernel.NO_DEVICES


class Room(NamedTuple):
    """What a layer may hold."""

    size_bytes: int
    num_inodes: int


class Layer:
    """A file system that is attached nowhere, except while a box starts."""

    def __init__(self, room: Room | int, users: Users) -> None:
        """Empty: a tmpfs with this room, or the disk that the owner has sent."""
        self._is_disk = isinstance(room, int)
        self._tree = _open_disk(room) if isinstance(room, int) else _make_tmpfs(room)
        try:
            for name, mode in (("u", 0o755), ("w", 0o700), ("s", 0o1777)):
                os.mkdir(name, 0o700, dir_fd=self._tree)
                os.chown(name, users.first_uid, users.first_gid, dir_fd=self._tree)
                os.chmod(name, mode, dir_fd=self._tree)
        except OSError:
            os.close(self._tree)
            raise

    def open_upper(self) -> int:
        """A descriptor of `u`."""
        return os.open("u", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self._tree)

    def resize(self, room: Room) -> None:
        """Change the room.

        Raises:
            OSError: EINVAL if more is in use, EOPNOTSUPP for a disk.
        """
        if self._is_disk:
            raise OSError(errno.EOPNOTSUPP, "a disk of the owner keeps its size")
        inodes = _with_own(room.num_inodes)
        kernel.reconfigure(self._tree, size=room.size_bytes, nr_inodes=inodes)

    def attach(self, path: str) -> None:
        """Mount it, and from now on hold a second mount of it: a mount can be moved only once.

        Kernels before 6.15 copy only what is attached, so that copy is made here.
        """
        kernel.attach(self._tree, path)
        copy = kernel.copy_tree(path, recursive=False)
        os.close(self._tree)
        self._tree = copy

    def close(self) -> None:
        """Let go; the files stay while a box uses them."""
        os.close(self._tree)


def _make_tmpfs(room: Room) -> int:
    inodes = _with_own(room.num_inodes)
    options: dict[str, str | int] = {"size": room.size_bytes, "nr_inodes": inodes, "mode": "0755"}
    return kernel.new_tree("tmpfs", _ATTRIBUTES, **options)


def _open_disk(given: int) -> int:
    if os.fstat(given).st_uid != 0:
        # As a disk of root's, where we are an ordinary user's helper.
        raise PermissionError(errno.EPERM, "furnishing a disk (is its top root's, and we too?)")
    kernel.set_tree(given, _ATTRIBUTES)
    return os.dup(given)


def attach_all(layers: Sequence[Layer], base: str) -> list[str]:
    """Mount each at `<base>/l/<n>`; detach what is returned."""
    paths: list[str] = []
    try:
        for number, layer in enumerate(layers):
            layer.attach(f"{base}/l/{number}")
            paths.append(f"{base}/l/{number}")
    except OSError:
        detach_all(paths)
        raise
    return paths


def detach_all(paths: Sequence[str]) -> None:
    """Undo `attach_all`."""
    for path in paths:
        kernel.detach(path)


def _with_own(num_inodes: int) -> int:
    """The root, the three directories below and the overlay's own take some too."""
    return min(num_inodes + 8, 2**32 - 1)
