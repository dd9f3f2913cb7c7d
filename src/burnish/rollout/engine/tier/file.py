"""The file that holds pages: unlinked from the start, sparse, a checksum per page."""

import errno
import os
import tempfile
import threading
import zlib
from collections.abc import Sequence

import numpy as np

from burnish.core.errors import UserError

Buffers = Sequence[memoryview]


class TierFile:
    """Records of one size at fixed places; reading and writing may happen on two threads."""

    def __init__(self, num_records: int, record_bytes: int, limit_bytes: int, folder: str) -> None:
        """Create it; it vanishes with the process.

        Raises:
            UserError: if there is no such directory, or no file can be made in it.
        """
        self.record_bytes, self._limit_bytes = record_bytes, limit_bytes
        self._checksums = np.zeros(num_records, dtype=np.uint32)
        self._is_there = np.zeros(num_records, dtype=np.bool_)
        self._lock = threading.Lock()
        self.num_there = 0
        folder = folder or tempfile.gettempdir()
        try:
            self._fd = _open_unlinked(folder)
        except OSError as error:
            raise UserError(
                f"engine.kv.disk_dir {folder}: no file can be made there ({error.strerror}).",
                fix="name a directory on a local disk that you may write to.",
            ) from error

    @property
    def used_bytes(self) -> int:
        """Bytes of all records that are there."""
        return self.num_there * self.record_bytes

    def has(self, record: int) -> bool:
        """Whether it was written and not dropped."""
        return bool(self._is_there[record])

    def write(self, record: int, buffers: Buffers) -> None:
        """Keep a record.

        Raises:
            OSError: if the disk or the limit is full, or the disk fails.
        """
        if not self._is_there[record] and self.used_bytes + self.record_bytes > self._limit_bytes:
            raise OSError(errno.ENOSPC, "engine.kv.disk_mb is used up")
        self.drop(record)
        done = os.pwritev(self._fd, buffers, record * self.record_bytes)
        if done != self.record_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        with self._lock:
            self._checksums[record] = _checksum(buffers)
            self._is_there[record] = True
            self.num_there += 1

    def read(self, record: int, buffers: Buffers) -> str | None:
        """Fill `buffers` with a record; what is wrong with it, or None."""
        try:
            done = os.preadv(self._fd, buffers, record * self.record_bytes)
        except OSError as error:
            return f"reading it failed: {error.strerror}"
        if done != self.record_bytes:
            return f"{done} of {self.record_bytes} bytes are there"
        if _checksum(buffers) != self._checksums[record]:
            return "its checksum is wrong"
        return None

    def drop(self, record: int) -> None:
        """Forget a record; its place on disk is used again by its next content."""
        with self._lock:
            self.num_there -= int(self._is_there[record])
            self._is_there[record] = False

    def close(self) -> None:
        """Give the disk back."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _open_unlinked(folder: str) -> int:
    flag = getattr(os, "O_TMPFILE", 0)
    if flag:
        try:
            return os.open(folder, flag | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError as error:
            # Some file systems have no nameless files.
            if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR):
                raise
    fd, path = tempfile.mkstemp(dir=folder, prefix="burnish-kv-")
    os.unlink(path)
    return fd


def _checksum(buffers: Buffers) -> int:
    value = 0
    for buffer in buffers:
        value = zlib.crc32(buffer, value)
    return value
