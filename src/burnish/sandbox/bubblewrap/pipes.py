"""Descriptors that a command gets, none of which can make the keeper wait."""

import asyncio
import contextlib
import fcntl
import os
from collections.abc import Callable
from typing import NamedTuple

_CHUNK_BYTES = 64 * 2**10
# The launcher's shell can only redirect descriptors of one digit: ours stay above.
_FIRST_OURS = 10


class Capture:
    """The first bytes of a pipe."""

    def __init__(self) -> None:
        """Make the pipe. Whoever takes `write_fd` closes it."""
        self._chunks: list[bytes] = []
        self._size = 0
        self._limit = 0
        self._on_overflow: Callable[[], None] | None = None
        self.cut = False
        self.read_fd, self.write_fd = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self.read_fd, False)

    def watch(self, limit_bytes: int, on_overflow: Callable[[], None]) -> None:
        """Keep `limit_bytes`; `on_overflow` is called once, when more came."""
        self._limit = limit_bytes
        self._on_overflow = on_overflow
        asyncio.get_running_loop().add_reader(self.read_fd, self._on_readable)

    def _on_readable(self) -> None:
        if not self._read_once():
            asyncio.get_running_loop().remove_reader(self.read_fd)

    def _read_once(self) -> bool:
        """False at the end, or when there is nothing to read now."""
        try:
            chunk = os.read(self.read_fd, _CHUNK_BYTES)
        except BlockingIOError:
            return False
        kept = chunk[: self._limit - self._size]
        self._chunks.append(kept)
        self._size += len(kept)
        if len(kept) < len(chunk) and not self.cut:
            self.cut = True
            if self._on_overflow is not None:
                self._on_overflow()
        return bool(chunk) and not self.cut

    def finish(self) -> bytes:
        """Everything kept, with what is in the pipe now; never waits."""
        while self._read_once():
            pass
        return b"".join(self._chunks)

    def close(self) -> None:
        """Free the reading end; call once."""
        asyncio.get_running_loop().remove_reader(self.read_fd)
        os.close(self.read_fd)


class Empty(NamedTuple):
    """A file in memory whose reader gets its content later."""

    writable: int
    readable: int


def open_empty() -> Empty:
    """A reader of such a file needs no writer, so that neither can block, unlike with a pipe."""
    writable = os.memfd_create("burnish", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    return Empty(writable, os.open(f"/proc/self/fd/{writable}", os.O_RDONLY | os.O_CLOEXEC))


def seal(writable: int, data: bytes) -> None:
    """Give the file its content; nobody can change it any more."""
    view = memoryview(data)
    while view:
        view = view[os.write(writable, view) :]
    seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
    fcntl.fcntl(writable, fcntl.F_ADD_SEALS, seals)


def sealed(data: bytes) -> int:
    """Such a file with its content, open for reading."""
    file = open_empty()
    seal(file.writable, data)
    os.close(file.writable)
    return file.readable


def read_now(descriptor: int) -> bytes:
    """What a non-blocking descriptor holds now, 4 KiB at most."""
    with contextlib.suppress(BlockingIOError):
        return os.read(descriptor, 4096)
    return b""


def above_shell(descriptor: int) -> int:
    """The same file under a number that no shell redirection uses."""
    moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _FIRST_OURS)
    os.close(descriptor)
    return moved
