"""What happened in a run, in order: typed events in `events.jsonl`.

After a resume the events of undone steps stay in the file; a `rolled_back` event says from where
the run went on.
"""

from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from threading import Lock
from typing import Any, Final

import msgspec

from burnish.core.clock import Clock
from burnish.core.errors import UserError
from burnish.core.records import Record
from burnish.telemetry.jsonl import JsonLinesFile, encode_line, read_lines

EVENT_FORMAT_VERSION: Final = 1


class EventKind(StrEnum):
    """What kind of thing happened."""

    RUN_STARTED = "run_started"
    """A fresh run directory was made."""
    RUN_RESUMED = "run_resumed"
    """A run went on in an old directory."""
    ROLLED_BACK = "rolled_back"
    """Steps after `step` were undone because no checkpoint holds them."""
    RUN_INTERRUPTED = "run_interrupted"
    """A person asked to stop; the run can be resumed."""
    RUN_FINISHED = "run_finished"
    """The last step was taken and the result written."""
    RUN_FAILED = "run_failed"
    """An error ended the run."""
    WARMUP_FINISHED = "warmup_finished"
    """Supervised warm-up is over."""
    STEP_FINISHED = "step_finished"
    """One optimizer step was taken and recorded."""
    WEIGHTS_PUBLISHED = "weights_published"
    """The engine answers with new weights."""
    CANARY_CHECKED = "canary_checked"
    """The served weights were compared with the trainer's; `data` has both values."""
    CHECKPOINT_SAVED = "checkpoint_saved"
    """The run can be resumed from here."""
    GROUP_DROPPED = "group_dropped"
    """A group or a part of it will not be trained; `data` has the reason."""
    ENVIRONMENT_CHECKED = "environment_checked"
    """The quality gate judged an environment."""
    ENVIRONMENT_QUARANTINED = "environment_quarantined"
    """An environment is shut out of sampling."""
    BREAKER_OPENED = "breaker_opened"
    """A domain is paused because its machinery kept failing."""
    BAD_CASE = "bad_case"
    """An item failed by its own fault; `data` is for whoever mends the environment."""
    CONTROLLED = "controlled"
    """A person changed the live run; `data` has what and the answer."""
    SHARES_DECIDED = "shares_decided"
    """How the budget is divided; `data` says for every domain why."""
    ROUND_STARTED = "round_started"
    """Groups expected to be long start together; `data` has how many."""
    BOX_HEDGED = "box_hedged"
    """A box took unusually long, so another one was asked for; `data` has which and after what."""
    FAILURE = "failure"
    """A classified failure."""
    EVALUATION_STARTED = "evaluation_started"
    """Held-out items are being sampled."""
    EVALUATION_FINISHED = "evaluation_finished"
    """Held-out pass rates are known."""


class Event(Record, frozen=True, kw_only=True):
    """One line of `events.jsonl`."""

    format_version: int = EVENT_FORMAT_VERSION
    """Version of this format."""
    t: float
    """Unix time, seconds."""
    kind: EventKind
    """What happened."""
    step: int
    """Optimizer step during which it happened; 0 before the first."""
    data: dict[str, Any] = msgspec.field(default_factory=dict)
    """Details, by kind."""


class EventWriter:
    """Appends events. May be called from any thread."""

    def __init__(self, path: Path, clock: Clock) -> None:
        """Open or create the file at `path`; a torn last line is cut away."""
        self._file = JsonLinesFile(path)
        self._clock = clock
        self._lock = Lock()

    def emit(self, kind: EventKind, step: int, **data: Any) -> Event:
        """Write one event; it survives a kill on return.

        Raises:
            DiskFullError: nothing was written.
        """
        event = Event(t=self._clock.wall_s(), kind=kind, step=step, data=data)
        line = encode_line(event)
        with self._lock:
            self._file.append(line)
        return event

    def close(self) -> None:
        """Make the file durable and close it."""
        with self._lock:
            self._file.close()


def read_events(path: Path) -> Iterator[Event]:
    """Events of a finished or a live run.

    Raises:
        UserError: for a version that this program does not know, or a damaged line.
    """
    for number, line in enumerate(read_lines(path), 1):
        try:
            version = msgspec.json.decode(line, type=_Versioned).format_version
            if version == EVENT_FORMAT_VERSION:
                yield msgspec.json.decode(line, type=Event)
                continue
        except msgspec.MsgspecError as error:
            what = f"{path}:{number}: not an event ({error})."
            raise UserError(what, fix="delete this line; the rest is whole.") from None
        what = (
            f"{path}:{number}: event format {version}, this program reads {EVENT_FORMAT_VERSION}."
        )
        raise UserError(what, fix="read it with the version of burnish that wrote it.")


class _Versioned(msgspec.Struct):
    format_version: int
