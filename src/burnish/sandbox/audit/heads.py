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

HEADS = "heads.jsonl"
_VERSION = 1


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

    def read(self) -> dict[str, list[Head]]:
        """Heads by log. Torn lines (a crash, a full disk) are left out.

        Raises:
            UserError: the file is missing or of another version, or no line of it is a head.
        """
        found: dict[str, list[Head]] = {}
        num_bad = 0
        for head in self._lines():
            if head is None:
                num_bad += 1
                continue
            if head.version != _VERSION:
                raise UserError(
                    f"{self.path}: its format has version {head.version}, not {_VERSION}.",
                    fix="verify with the version of burnish that wrote it",
                )
            found.setdefault(head.log, []).append(head)
        if num_bad and not found:
            raise UserError(
                f"{self.path} is no file of heads: no line of it is one.",
                fix="give the path of the heads.jsonl that was kept, or verify without heads",
            )
        return found

    def _lines(self) -> Iterator[Head | None]:
        """None for a line that is whole and no head."""
        try:
            file = open(self.path, "rb")  # noqa: SIM115 (opened here to name a missing file)
        except FileNotFoundError as error:
            raise UserError(
                f"{self.path}: no such file, so nothing shows whether a log was cut or removed.",
                fix="give the path of the heads.jsonl that was kept, or verify without heads",
            ) from error
        with file:
            for data in file:
                try:
                    yield msgspec.json.decode(data, type=Head)
                except (msgspec.DecodeError, UnicodeDecodeError):
                    # The end of a file that was just begun is torn, which says nothing about it.
                    if data.endswith(b"\n"):
                        yield None
