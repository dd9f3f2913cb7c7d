"""Append-only files of JSON lines that survive a kill at any byte."""

import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from burnish.core.disk import full_disk_is_one_line

_TAIL_BYTES = 1 << 16


class JsonLinesFile:
    """One writer. A line is there completely or not at all.

    Each line is one write to a file opened for appending, so a killed process leaves at most one
    torn line, at the end; opening the file again cuts it away.
    """

    def __init__(self, path: Path) -> None:
        """Open or create `path`, cutting a torn last line."""
        self._path = path
        with full_disk_is_one_line(path):
            flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            self._descriptor = os.open(path, flags, 0o644)
        end = _end_of_last_line(self._descriptor)
        if end != os.fstat(self._descriptor).st_size:
            os.ftruncate(self._descriptor, end)

    def append(self, line: bytes) -> None:
        """Write one line; safe against a kill of this process on return, not yet a power cut.

        Raises:
            DiskFullError: nothing of the line is left in the file.
        """
        assert b"\n" not in line, "one line at a time"
        before = os.fstat(self._descriptor).st_size
        data = memoryview(line + b"\n")
        with full_disk_is_one_line(self._path):
            try:
                while data:
                    data = data[os.write(self._descriptor, data) :]
            except OSError:
                os.ftruncate(self._descriptor, before)
                raise

    def sync(self) -> None:
        """Make all lines durable against a power cut."""
        with full_disk_is_one_line(self._path):
            os.fsync(self._descriptor)

    def close(self) -> None:
        """Sync and close. May be called twice."""
        if self._descriptor >= 0:
            self.sync()
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def encode_line(record: Any) -> bytes:
    """One JSON line. Text that is not Unicode (lone surrogates) is escaped, never refused."""
    try:
        return msgspec.json.encode(record)
    except UnicodeEncodeError:
        return msgspec.json.encode(_escaped(msgspec.to_builtins(record)))


def read_lines(path: Path) -> Iterator[bytes]:
    """Complete lines of a file that may still be written; none if it does not exist yet."""
    if not path.exists():
        return
    with open(path, "rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                yield line[:-1]


def _escaped(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {_escaped(key): _escaped(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_escaped(inner) for inner in value]
    return value


def _end_of_last_line(descriptor: int) -> int:
    """Offset after the last line break; 0 if there is none."""
    position = os.fstat(descriptor).st_size
    while position > 0:
        start = max(0, position - _TAIL_BYTES)
        found = os.pread(descriptor, position - start, start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        position = start
    return 0
