"""Appending to the log of one box.

Each line is one `write` to a file opened with O_APPEND: a crash leaves whole lines and at most a
torn last one. What was written survives the death of this process. It survives the death of the
machine from the next `fsync` on: at the end of the box (the default), or after every line.

The file is opened for every line, so that thousands of live boxes hold no descriptors, and a file
that was removed, replaced or changed by somebody else is noticed at the next line.

A line that cannot be written (full disk) raises `AuditFailure`, and what was half written is taken
back. As soon as there is space again, the next line is preceded by a `gap` line with the number of
lines that are missing.
"""

import os
import threading
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

from burnish.core.clock import Clock
from burnish.core.errors import ClassifiedFailure, one_line
from burnish.core.records import Failure
from burnish.core.vocabulary import FailureKind
from burnish.sandbox.audit.events import VERSION, AnyEvent, Gap, Line, digest, encode

_HEAD_INTERVAL = 64
# Lines between two heads of a living box, so what can be cut off unseen if its owner is killed: one
# head of 200 bytes in 50 KiB of lines.

_APPEND = os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC


class Sync(StrEnum):
    """When lines are forced to the disk."""

    END = "end"
    """When the box ends: a power cut may cost the lines of living boxes."""
    EACH = "each"
    """After every line: milliseconds for each on most disks."""


class AuditFailure(ClassifiedFailure):
    """A line could not be written: nothing may go on unseen."""

    def __init__(self, path: Path, error: OSError | LookupError) -> None:
        """Name the file and the reason."""
        self.reason = one_line(error)
        super().__init__(
            Failure(
                kind=FailureKind.INFRA,
                where="sandbox.audit",
                message=f"{path.name} cannot be written: {self.reason}",
            )
        )


class Place(NamedTuple):
    """Where a line is."""

    number: int
    """From 0."""
    hash: str
    """SHA-256 of the line."""


class BoxLog:
    """The writer of one file. May be called from several threads."""

    def __init__(
        self,
        path: Path,
        box: str,
        prev: str,
        clock: Clock,
        *,
        sync: Sync = Sync.END,
        on_head: Callable[[Path, str, int, str], None] | None = None,
    ) -> None:
        """Begin a log.

        Args:
            path: an empty file.
            box: id of the box.
            prev: hash that the chain starts from.
            clock: times of the lines.
            sync: when lines are forced to the disk.
            on_head: gets path, box, number and hash of the newest line now and then.
        """
        self.path = path
        self.box = box
        self._head = prev
        self._clock = clock
        self._sync = sync
        self._on_head = on_head
        self._lock = threading.Lock()
        self._number = 0
        self._size = 0
        self._lost = 0
        self._error = ""
        self._last_head = -1

    def append(self, event: AnyEvent, *, last: bool = False) -> Place:
        """Write a line; returns where it is.

        Raises:
            AuditFailure: it was not written.
        """
        with self._lock:
            try:
                if self._lost:
                    self._write(Gap(num_lost=self._lost, error=self._error), sync=False)
                    self._lost, self._error = 0, ""
                place = self._write(event, sync=last or self._sync is Sync.EACH)
            except OSError as error:
                self._lost += 1
                self._error = one_line(error)
                raise AuditFailure(self.path, error) from error
            self._send_head(last=last)
            return place

    def _write(self, event: AnyEvent, *, sync: bool) -> Place:
        line = Line(
            version=VERSION,
            number=self._number,
            time_s=self._clock.wall_s(),
            box=self.box,
            prev=self._head,
            event=event,
        )
        data = encode(line)
        self._append_bytes(data + b"\n", sync=sync)
        place = Place(self._number, digest(data))
        self._head = place.hash
        self._number += 1
        self._size += len(data) + 1
        return place

    def _append_bytes(self, data: bytes, *, sync: bool) -> None:
        descriptor = os.open(self.path, _APPEND)
        try:
            found = os.fstat(descriptor).st_size
            if found != self._size:
                raise OSError(f"somebody else changed it: {found} bytes instead of {self._size}")
            try:
                # A short write is followed by one that says why, such as ENOSPC.
                while data:
                    data = data[os.write(descriptor, data) :]
                if sync:
                    os.fsync(descriptor)
            except OSError:
                os.ftruncate(descriptor, self._size)
                raise
        finally:
            os.close(descriptor)

    def _send_head(self, *, last: bool) -> None:
        """A head that cannot be sent is a failure, and sent with the next line instead."""
        due = self._last_head < 0 or self._number - self._last_head >= _HEAD_INTERVAL
        if self._on_head is None or not (due or last):
            return
        try:
            self._on_head(self.path, self.box, self._number - 1, self._head)
        except OSError as error:
            self._last_head = -1
            raise AuditFailure(self.path, error) from error
        self._last_head = self._number
