"""Descriptors that a command gets, none of which can make the keeper wait."""

import asyncio
import contextlib
import fcntl
import os
from collections.abc import Callable

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
        self._mark = b""
        self._held = b""
        self.marked = asyncio.Event()
        self.read_fd, self.write_fd = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self.read_fd, False)

    def watch(self, limit_bytes: int, on_overflow: Callable[[], None]) -> None:
        """Keep `limit_bytes`; `on_overflow` is called once, when more came."""
        self._limit = limit_bytes
        self._on_overflow = on_overflow
        asyncio.get_running_loop().add_reader(self.read_fd, self._on_readable)

    def expect(self, mark: bytes) -> None:
        """Keep nothing from `mark` on, which sets `marked`."""
        self._mark = mark

    def _on_readable(self) -> None:
        if not self._read_once():
            asyncio.get_running_loop().remove_reader(self.read_fd)

    def _read_once(self) -> bool:
        """False at the end, or when there is nothing to read now."""
        try:
            chunk = os.read(self.read_fd, _CHUNK_BYTES)
        except BlockingIOError:
            return False
        self._keep(chunk)
        return bool(chunk) and not self.cut

    def _keep(self, chunk: bytes) -> None:
        if self.marked.is_set():
            return
        if not self._mark:
            self._keep_all(chunk)
            return
        before, found, _ = (self._held + chunk).partition(self._mark)
        held = 0 if found else _overlap(before, self._mark)
        self._held = before[len(before) - held :]
        self._keep_all(before[: len(before) - held])
        if found:
            self.marked.set()

    def _keep_all(self, chunk: bytes) -> None:
        kept = chunk[: self._limit - self._size]
        self._chunks.append(kept)
        self._size += len(kept)
        if len(kept) < len(chunk) and not self.cut:
            self.cut = True
            if self._on_overflow is not None:
                self._on_overflow()

    def drain(self) -> None:
        """Read on to the end although no more is kept: a writer that blocks would not end."""
        asyncio.get_running_loop().add_reader(self.read_fd, self._on_drain)

    def _on_drain(self) -> None:
        try:
            chunk = os.read(self.read_fd, _CHUNK_BYTES)
        except BlockingIOError:
            return
        if not chunk:
            asyncio.get_running_loop().remove_reader(self.read_fd)
        elif not self.cut:
            self._keep(chunk)

    def discard(self) -> None:
        """Read on, and keep nothing any more."""
        self.cut = True
        self.drain()

    def finish(self) -> bytes:
        """Everything kept, with what is in the pipe now; never waits."""
        while self._read_once():
            pass
        held, self._held = self._held, b""
        self._keep_all(held)
        return b"".join(self._chunks)

    def close(self) -> None:
        """Free the reading end; call once."""
        asyncio.get_running_loop().remove_reader(self.read_fd)
        os.close(self.read_fd)


def _overlap(text: bytes, mark: bytes) -> int:
    """How much of the end of `text` may be the beginning of `mark`."""
    most = min(len(text), len(mark) - 1)
    return next((n for n in range(most, 0, -1) if mark.startswith(text[len(text) - n :])), 0)


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
