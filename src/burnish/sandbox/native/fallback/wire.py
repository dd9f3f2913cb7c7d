"""Messages of `protocol` in and out: packing, unpacking, descriptors."""

from __future__ import annotations

import array
import errno
import os
import socket
import struct
from typing import Callable, NamedTuple, Sequence, TypeVar

from ..protocol import HEADER, MAX_MESSAGE_BYTES, Op

_MAX_FDS = 16
_T = TypeVar("_T")


class Malformed(Exception):
    """A message breaks the rules of the protocol."""


class Message(NamedTuple):
    """One message."""

    op: int
    flags: int
    id: int
    body: bytes
    fds: list[int]


class Fields:
    """Reads the body of a message, front to back."""

    def __init__(self, body: bytes) -> None:
        self._body = body
        self._at = 0

    def _number(self, layout: str) -> int:
        size = struct.calcsize(layout)
        return int(struct.unpack(layout, self._take(size))[0])

    def _take(self, size: int) -> bytes:
        if size > len(self._body) - self._at:
            raise Malformed("fields are missing")
        self._at += size
        return self._body[self._at - size : self._at]

    def u16(self) -> int:
        """A number."""
        return self._number("<H")

    def u32(self) -> int:
        """A number."""
        return self._number("<I")

    def u64(self) -> int:
        """A number."""
        return self._number("<Q")

    def text(self) -> bytes:
        """A string, without the NUL at its end."""
        end = self._body.find(b"\0", self._at)
        if end < 0:
            raise Malformed("a string has no end")
        return self._take(end + 1 - self._at)[:-1]

    def path(self) -> str:
        """A string that names a file."""
        return os.fsdecode(self.text())

    def many(self, one: Callable[[], _T], count: int | None = None) -> list[_T]:
        """A list; every item takes at least a byte, so a false count ends early."""
        return [one() for _ in range(self.u32() if count is None else count)]

    def end(self) -> None:
        """Nothing may be left."""
        if self._at != len(self._body):
            raise Malformed("bytes are left over")


class Channel:
    """A SEQPACKET socket that carries messages."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._buffer = bytearray(MAX_MESSAGE_BYTES + 1)

    def fileno(self) -> int:
        """For poll."""
        return self._socket.fileno()

    def receive(self) -> Message | None:
        """The next message, None at the end.

        Raises:
            Malformed: its size is wrong, or descriptors got lost; none stays open.
        """
        space = socket.CMSG_SPACE(_MAX_FDS * 4)
        flags = socket.MSG_CMSG_CLOEXEC
        size, control, state, _ = self._socket.recvmsg_into([self._buffer], space, flags)
        found = array.array("i")
        for level, kind, data in control:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                found.frombytes(data[: len(data) - len(data) % 4])
        fds = found.tolist()
        if size == 0 and not fds:
            return None
        whole = bytes(memoryview(self._buffer)[:size])
        if state & (socket.MSG_TRUNC | socket.MSG_CTRUNC) or size < HEADER.size:
            close_all(fds)
            raise Malformed("a message of a wrong size")
        stated, op, flag, number = HEADER.unpack_from(whole)
        if stated != size or size > MAX_MESSAGE_BYTES:
            close_all(fds)
            raise Malformed(f"a message of {size} bytes says that it has {stated}")
        return Message(op, flag, number, whole[HEADER.size :], fds)

    def send(self, op: Op, number: int, body: bytes = b"", fds: Sequence[int] = ()) -> None:
        """Send one message."""
        message = HEADER.pack(HEADER.size + len(body), op, 0, number) + body
        control = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        self._socket.sendmsg([message], control)

    def send_error(self, number: int, error: int, stage: str) -> None:
        """Say why a request failed; a number that is no errno becomes EIO."""
        error = error if 1 <= error <= 4095 else errno.EIO
        text = stage.encode("utf-8", "replace")[:1000].replace(b"\0", b"?")
        self.send(Op.ERROR, number, struct.pack("<iI", error, len(text)) + text)


def close_all(fds: Sequence[int]) -> None:
    """Close each; what is closed already stays so."""
    for descriptor in fds:
        try:
            os.close(descriptor)
        except OSError:
            continue


def read_all(descriptor: int) -> bytes:
    """The content of a file from its start, wherever its offset is."""
    parts: list[bytes] = []
    size = 0
    while True:
        part = os.pread(descriptor, 2**20, size)
        if not part:
            return b"".join(parts)
        parts.append(part)
        size += len(part)
