"""The directory of all logs, and which box writes to which."""

import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from burnish.core.boxes import Sandbox
from burnish.core.clock import Clock, SystemClock
from burnish.core.disk import sync_directory
from burnish.core.errors import UserError
from burnish.sandbox.audit.events import Created, Destroyed, NetworkDecided
from burnish.sandbox.audit.heads import HEADS, Heads
from burnish.sandbox.audit.log import AuditFailure, BoxLog, Sync
from burnish.sandbox.network.events import NetworkEvent

_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_-]+")
_MAX_NAME_CHARS = 80
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class AuditLogs:
    """One log per box: `directory/<date>/<time>-<box>.jsonl`. Thread-safe."""

    def __init__(
        self,
        directory: Path,
        *,
        heads: Path | None = None,
        sync: Sync = Sync.END,
        image_digest: Callable[[str], str | None] | None = None,
        clock: Clock | None = None,
    ) -> None:
        """Prepare the directory.

        Args:
            directory: of the logs; made if it is missing.
            heads: file that shows cuts and removals; best where the owner of the boxes can append
                only. By default `heads.jsonl` beside the logs.
            sync: when lines are forced to the disk.
            image_digest: digest of the content of an image, where known.
            clock: times of the lines.

        Raises:
            UserError: the directory cannot be made or written.
        """
        self._directory = directory
        self._heads = Heads(heads or directory / HEADS, directory)
        self._sync = sync
        self._clock = clock or SystemClock()
        self._open: dict[str, BoxLog] = {}
        self.image_digest = image_digest or (lambda image: None)
        try:
            directory.mkdir(parents=True, exist_ok=True)
            writable = os.access(directory, os.W_OK | os.X_OK)
        except OSError:
            writable = False
        if not writable:
            raise UserError(
                f"{directory}: audit logs cannot be written there.",
                fix="choose a directory that you may write",
            )
        self._lock = threading.Lock()

    def begin(self, box: Sandbox, created: Created, prev: str) -> BoxLog:
        """Begin the log of a box with its first line, which continues the hash `prev`.

        Raises:
            AuditFailure: it cannot be written.
        """
        path = self._make_file(box.id)
        log = BoxLog(path, box.id, prev, self._clock, sync=self._sync, on_head=self._heads.append)
        try:
            log.append(created)
        except AuditFailure:
            path.unlink(missing_ok=True)
            raise
        with self._lock:
            self._open[box.id] = log
        return log

    @contextmanager
    def ending(self, log: BoxLog) -> Iterator[None]:
        """Write the last line of a log on exit, when its box is gone.

        Raises:
            AuditFailure: it was not written. Does not take the place of another exception.
        """
        try:
            yield
        except BaseException as error:
            try:
                self._end(log)
            except AuditFailure as failure:
                error.add_note(f"and the audit log has no end: {failure}")
            raise
        self._end(log)

    def _end(self, log: BoxLog) -> None:
        with self._lock:
            if self._open.get(log.box) is log:
                del self._open[log.box]
        log.append(Destroyed(), last=True)

    def network(self, event: NetworkEvent) -> None:
        """Where a proxy sends its decisions (an `EventSink`).

        Raises:
            AuditFailure: it cannot be written, so the connection must not be.
        """
        with self._lock:
            log = self._open.get(event.box)
        if log is None:
            raise AuditFailure(self._directory, LookupError(f"no log of a box {event.box!r}"))
        log.append(
            NetworkDecided(
                host=event.host,
                port=event.port,
                address=event.address,
                verdict=event.verdict,
                reason=event.reason,
                bytes_out=event.bytes_out,
                bytes_in=event.bytes_in,
            )
        )

    def _make_file(self, box: str) -> Path:
        try:
            for path in self._names(box):
                try:
                    os.close(os.open(path, _NEW_FILE, 0o640))
                except FileExistsError:
                    continue
                return path
        except OSError as error:
            raise AuditFailure(self._directory, error) from error
        raise AssertionError("unreachable: names do not end")

    def _names(self, box: str) -> Iterator[Path]:
        """Of the file. The id of a box may come from another machine: it is no file name."""
        when = time.gmtime(self._clock.wall_s())
        day = self._directory / time.strftime("%Y-%m-%d", when)
        if not day.exists():
            day.mkdir(exist_ok=True)
            sync_directory(self._directory)
        stem = f"{time.strftime('%H%M%S', when)}-{_NOT_IN_NAMES.sub('_', box)[:_MAX_NAME_CHARS]}"
        yield day / f"{stem}.jsonl"
        number = 2
        while True:
            yield day / f"{stem}.{number}.jsonl"
            number += 1
