"""What `burnish doctor` prints: one record per thing that was tried."""

from burnish.core.records import Record


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
