"""What is said over a control socket: one JSON object per line, one answer per line.

    {"verb": "status"}                                  -> {"ok": true, "result": {...}}
    {"verb": "add", "domain": "x", "environment": "m:C"} -> {"ok": false, "error": "..."}

Unknown verbs, unknown fields and everything that is not JSON get an answer that says so.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import msgspec

from burnish.core.records import Record

MAX_LINE_BYTES = 1 << 16
"""Longer requests are refused: a request names a domain and a few numbers."""


class Verb(StrEnum):
    """What can be asked of a live run."""

    STATUS = "status"
    """Say how it is doing."""
    PAUSE = "pause"
    """Start nothing new and train nothing until told to go on."""
    RESUME = "resume"
    """Go on."""
    STOP = "stop"
    """End after the step in progress, with a checkpoint."""
    ADD = "add"
    """Train a further domain, once it has passed the quality gate."""
    REMOVE = "remove"
    """Stop training a domain."""
    SHARE = "share"
    """Change a domain's priority or bounds."""


Share = Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]


class Request(Record, frozen=True, kw_only=True):
    """One line from a client."""

    verb: Verb
    """What to do."""
    domain: Annotated[str, msgspec.Meta(max_length=200)] | None = None
    """Whom it is about; for add, remove and share."""
    environment: Annotated[str, msgspec.Meta(max_length=500)] | None = None
    """Registered name or `module:Class`; for add, if it is not the domain's own name."""
    weight: Annotated[float, msgspec.Meta(gt=0.0, le=1e6)] | None = None
    """For add and share: what multiplies its value and its floor."""
    min_share: Share | None = None
    """For add and share: least part of the budget."""
    max_share: Share | None = None
    """For add and share: greatest part of the budget."""
    false_pass: Share | None = None
    """For share: part of its passes that an audit found to be undeserved."""


class Answer(Record, frozen=True, kw_only=True):
    """One line to a client."""

    ok: bool
    """Whether it was done."""
    result: dict[str, Any] = msgspec.field(default_factory=dict)
    """What was asked for."""
    error: str | None = None
    """Why not, and the fix."""


def socket_path(run: Path) -> Path:
    """Where a run listens."""
    return run / "control.sock"


def parse(line: bytes) -> Request | str:
    """A request, or what is wrong with the line."""
    try:
        request = msgspec.json.decode(line, type=Request)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        return f"not a request: {error}"
    if request.verb in (Verb.ADD, Verb.REMOVE, Verb.SHARE) and not request.domain:
        return f"{request.verb} needs a domain"
    return request
