"""Hashes of the newest lines of all logs, in one file: they show that a log was cut or removed.

The chain proves that lines belong together, not that the last ones are still there. Whoever can
write both this file and the logs can make both agree, so it is worth most where the owner of the
boxes can append only, or on another machine.

One line is one `write` of less than 4 KiB to a file opened with O_APPEND, so that several processes
may share it.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from burnish.core.errors import UserError
from burnish.core.records import Record
from burnish.sandbox.archive.compression import open_regular

HEADS = "heads.jsonl"
_VERSION = 1
# In strings of a head there is no quotation mark without a backslash.
_START = b'{"version":'
_MAX_LINE_BYTES = 2**16


class Head(Record, frozen=True, kw_only=True):
    """A line that a log must have."""

    version: int
    """Of this format."""
    log: str
    """Path of the log, relative to the directory of the logs."""
    box: str
    """Id of the box, in ASCII."""
    number: int
    """Of the line."""
    hash: str
    """SHA-256 of the line."""


class KeptHeads(NamedTuple):
    """What a file of heads says."""

    by_log: dict[str, list[Head]]
    """Heads of each log."""
    num_torn: int
    """Lines before its end that are no heads: a crash, a full disk or somebody tore them."""
    first_torn: int
    """The number of the first of them, from 1; 0 if there is none."""


class Heads(NamedTuple):
    """The file, and the directory of the logs that it speaks of."""

    path: Path
    directory: Path

    def append(self, log: Path, box: str, number: int, line_hash: str) -> None:
        """Note the newest line of a log.

        Raises:
            OSError: it cannot be written.
        """
        head = Head(
            version=_VERSION,
            log=log.relative_to(self.directory).as_posix(),
            box=ascii(box)[1:-1][:200],
            number=number,
            hash=line_hash,
        )
        data = msgspec.json.encode(head) + b"\n"
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(self.path, flags, 0o640)
        try:
            written = os.write(descriptor, data)
            if written < len(data):
                raise OSError(f"{self.path.name}: {written} of {len(data)} bytes written")
        finally:
            os.close(descriptor)

    def read(self) -> KeptHeads:
        """All that can be read.

        Raises:
            UserError: the file is missing or of another version, or no line of it is a head.
        """
        found: dict[str, list[Head]] = {}
        torn: list[int] = []
        for number, data in enumerate(self._lines(), start=1):
            head = _decode(data)
            if head is None:
                # The next head of another process follows a torn one in the same line.
                head = _decode(data[data.rfind(_START) :])
                # The end of a file that was just begun is torn, which says nothing about it.
                if data.endswith(b"\n"):
                    torn.append(number)
            if head is None:
                continue
            if head.version != _VERSION:
                raise UserError(
                    f"{self.path}: its format has version {head.version}, not {_VERSION}.",
                    fix="verify with the version of burnish that wrote it",
                )
            found.setdefault(head.log, []).append(head)
        if torn and not found:
            raise UserError(
                f"{self.path} is no file of heads: no line of it is one.",
                fix="give the path of the heads.jsonl that was kept, or verify without heads",
            )
        return KeptHeads(found, len(torn), torn[0] if torn else 0)

    def _lines(self) -> Iterator[bytes]:
        if not self.path.exists():
            raise UserError(
                f"{self.path}: no such file, so nothing shows whether a log was cut or removed.",
                fix="give the path of the heads.jsonl that was kept, or verify without heads",
            )
        with open_regular(self.path) as file:
            while data := file.readline(_MAX_LINE_BYTES):
                yield data


def _decode(data: bytes) -> Head | None:
    """None for what is no head."""
    try:
        return msgspec.json.decode(data, type=Head)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
