"""What `burnish doctor` prints: one record per thing that was tried."""

from enum import StrEnum

from burnish.core.records import Record


class Importance(StrEnum):
    """What it means that something is not there."""

    NEEDED = "needed"
    """Runs fail without it."""
    BETTER = "better"
    """Runs are slower, or less protected, without it."""
    OPTIONAL = "optional"
    """Only who asks for it misses it."""


class Check(Record, frozen=True, kw_only=True):
    """One thing that this machine can or cannot do."""

    name: str
    """What was tried, in a word or two."""
    ok: bool
    """Whether it works."""
    detail: str
    """What was found, in one line."""
    fix: str = ""
    """The exact command that puts it right; empty when `ok`."""
    importance: Importance = Importance.NEEDED
    """What it means if it does not work."""
