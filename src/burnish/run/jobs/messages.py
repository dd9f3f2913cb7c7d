"""What is said over the socket of the jobs daemon: one JSON object per line."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import msgspec

from burnish.core.records import Record


class JobVerb(StrEnum):
    """What can be asked of the daemon."""

    SUBMIT = "submit"
    """Queue a run."""
    LIST = "list"
    """Say what runs and waits."""
    CANCEL = "cancel"
    """Give a job up."""
    LEND = "lend"
    """A job can do without some of its units for now."""
    STOP = "stop"
    """End the daemon; what runs saves a checkpoint and goes on when it is started again."""


Text = Annotated[str, msgspec.Meta(min_length=1, max_length=1000)]


class JobRequest(Record, frozen=True, kw_only=True):
    """One line from a client."""

    verb: JobVerb
    """What to do."""
    job_id: Annotated[str, msgspec.Meta(pattern=r"^[a-zA-Z0-9][a-zA-Z0-9_.-]{0,63}$")] | None = None
    """Which job; for all but list and stop."""
    config: Text | None = None
    """For submit: absolute path of the run's file."""
    overrides: Annotated[tuple[Text, ...], msgspec.Meta(max_length=100)] = ()
    """For submit: values as in `burnish run --set`."""
    tenant: Text = "default"
    """For submit: on whose account."""
    units: Annotated[int, msgspec.Meta(ge=0, le=10**6)] = 1
    """For submit and lend: cores."""
    priority: Annotated[int, msgspec.Meta(ge=-1000, le=1000)] = 0
    """For submit: higher goes first."""


def jobs_socket(directory: Path) -> Path:
    """Where the daemon of a directory listens."""
    return directory / "jobs.sock"


def parse_job(line: bytes) -> JobRequest | str:
    """A request, or what is wrong with the line."""
    try:
        request = msgspec.json.decode(line, type=JobRequest)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        return f"not a request: {error}"
    if request.verb not in (JobVerb.LIST, JobVerb.STOP) and not request.job_id:
        return f"{request.verb} needs a job_id"
    if request.verb is JobVerb.SUBMIT and not request.config:
        return "submit needs a config"
    return request
