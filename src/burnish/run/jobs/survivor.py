"""Finds the process of a job again after the daemon that started it was killed.

A number alone may be anybody's by then. Noted is also when the process began, in which boot and in
which namespace; a descriptor of the process is opened before these are compared, and everything
that is done to the process afterwards goes through that descriptor.
"""

from __future__ import annotations

import os
import select
import signal
from contextlib import suppress
from pathlib import Path

import msgspec

from burnish.core.disk import write_atomically
from burnish.core.errors import UserError
from burnish.core.records import Record
from burnish.sandbox.keeper.children import readable
from burnish.sandbox.proctree import start_ticks
from burnish.telemetry.events import EventKind, read_events

_INTERRUPTED = 130
_BEGINS = (EventKind.RUN_STARTED, EventKind.RUN_RESUMED)
_STATUS = {
    EventKind.RUN_FINISHED: 0,
    EventKind.RUN_FAILED: 1,
    EventKind.RUN_INTERRUPTED: _INTERRUPTED,
}


class _Note(Record, frozen=True, kw_only=True):
    """Which process a job is; `process.json` in its folder."""

    boot_id: str
    """Of the kernel."""
    namespace: int
    """Inode of the namespace that the number is from."""
    pid: int
    """Its number."""
    start_ticks: int
    """When it began."""


class Survivor:
    """A process that somebody else started; it is used as one of asyncio's."""

    def __init__(self, pid: int, descriptor: int, folder: Path) -> None:
        """The descriptor is its owner's from now on."""
        self.pid, self._descriptor, self._folder = pid, descriptor, folder
        self.returncode: int | None = None

    def terminate(self) -> None:
        """Ask it to save a checkpoint and end.

        Raises:
            ProcessLookupError: it is gone.
        """
        signal.pidfd_send_signal(self._descriptor, signal.SIGTERM)

    async def wait(self) -> int:
        """Its exit status, as far as its records tell."""
        await readable(os.dup(self._descriptor))
        os.close(self._descriptor)
        self.returncode = _recorded_status(self._folder)
        return self.returncode


def note_process(folder: Path, pid: int) -> None:
    """Keep what `find_survivor` needs; `pid` is a child that was not waited for yet."""
    note = _note(pid)
    write_atomically(folder / "process.json", msgspec.json.encode(note))


def find_survivor(folder: Path) -> Survivor | None:
    """The process that was noted, if it still lives."""
    try:
        note = msgspec.json.decode((folder / "process.json").read_bytes(), type=_Note)
        descriptor = os.pidfd_open(note.pid)
    except (OSError, ValueError, OverflowError):
        # Nothing was noted, or it is damaged, or there is no such process: nobody to wait for.
        return None
    if _note(note.pid) == note and not _has_ended(descriptor):
        return Survivor(note.pid, descriptor, folder)
    os.close(descriptor)
    return None


def newest_run(folder: Path) -> Path | None:
    """The run of a job, once it has one."""
    runs = [p for p in folder.iterdir() if (p / "manifest.json").exists()]
    return max(runs, key=lambda p: p.stat().st_mtime, default=None)


def _note(pid: int) -> _Note:
    return _Note(
        boot_id=Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        namespace=os.stat("/proc/self/ns/pid").st_ino,
        pid=pid,
        start_ticks=start_ticks(pid),
    )


def _has_ended(descriptor: int) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(0))


def _recorded_status(folder: Path) -> int:
    # Who wrote no end was killed. Before there are records, SIGTERM does that, and loses nothing.
    run = newest_run(folder)
    if run is None:
        return -signal.SIGTERM
    status = -signal.SIGKILL
    with suppress(OSError, UserError):
        for event in read_events(run / "events.jsonl"):
            if event.kind in _BEGINS:
                status = -signal.SIGKILL
            status = _STATUS.get(event.kind, status)
    return int(status)
