"""The files of one box, in a volume that a container of ours holds: our side."""

import asyncio
import os
import socket
from pathlib import Path

from burnish.core.boxes import Limits
from burnish.sandbox.keeper.namespace import tmpfs_size

ANSWER_DEADLINE_S = 30.0
_BASE_SIZE = Limits().disk_bytes


class VolumeStorage:
    """As `keeper.storage.Storage`, but shared memory has no size of its own."""

    def __init__(self, path: Path, connection: socket.socket, place_fd: int, work_fd: int) -> None:
        """Take over what the storekeeper gave.

        Args:
            path: of the volume, as the daemon knows it.
            connection: to the storekeeper; hanging up ends it.
            place_fd: the volume.
            work_fd: the box's `/work`.
        """
        self.path = path
        self.work_fd = work_fd
        self._place_fd = place_fd
        self._connection = connection
        self._applied: tuple[int, int | None] = (_BASE_SIZE, None)

    def resize(self, limits: Limits) -> bool:
        """Set the room.

        Raises:
            OSError: EINVAL if more is in use.
        """
        wanted = (limits.disk_bytes, limits.num_inodes)
        if wanted != self._applied:
            self._connection.send(tmpfs_size(*wanted).encode())
            number = int(self._connection.recv(64) or b"32")
            if number:
                raise OSError(number, f"the volume: {os.strerror(number)}")
            self._applied = wanted
        return False

    def used_bytes(self) -> int:
        """In memory, all of it."""
        room = os.fstatvfs(self._place_fd)
        return (room.f_blocks - room.f_bfree) * room.f_frsize

    def is_full(self) -> bool:
        """Whether no space or no inode is left."""
        room = os.fstatvfs(self._place_fd)
        return room.f_bfree == 0 or room.f_ffree == 0

    def close(self) -> None:
        """Free our side."""
        os.close(self.work_fd)
        os.close(self._place_fd)
        self._connection.close()


def volume_options() -> str:
    """How the volume is mounted, before it has its directories."""
    return f"{tmpfs_size(_BASE_SIZE)},mode=711,nosuid,nodev"


async def accept_storage(listener: socket.socket, path: Path) -> VolumeStorage:
    """Wait for a storekeeper that is being started.

    Raises:
        OSError: it did not come, or something else did.
    """
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(ANSWER_DEADLINE_S):
            connection, _ = await loop.sock_accept(listener)
    except TimeoutError as error:
        raise OSError(0, "the container of the box's files does not answer") from error
    connection.settimeout(ANSWER_DEADLINE_S)
    try:
        _, descriptors, _, _ = await asyncio.to_thread(socket.recv_fds, connection, 16, 2)
        if len(descriptors) != 2:
            raise OSError(0, "the container of the box's files gave nothing")
    except OSError:
        connection.close()
        raise
    return VolumeStorage(path, connection, *descriptors)
