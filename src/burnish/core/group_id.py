"""Names of groups: `{domain}/{index}`, and `{domain}/{index}~{visit}` for an item that came back.

An item is trained more than once only as a rehearsal. Each visit samples with its own randomness
and has its own rows in ledger and store, so its name must differ; the first one's has no suffix.
"""

from __future__ import annotations

from typing import NamedTuple

_VISIT = "~"


class GroupName(NamedTuple):
    """The parts of a group's name."""

    domain: str
    """Environment name."""
    item: int
    """Item of its pool."""
    visit: int
    """0 for the first time, else a number that differs for each visit within the domain."""


def group_id(domain: str, index: int, visit: int = 0) -> str:
    """The name of a group."""
    return f"{domain}/{index}{_VISIT}{visit}" if visit else f"{domain}/{index}"


def parse_group_id(name: str) -> GroupName:
    """The parts of what `group_id` made."""
    domain, _, place = name.rpartition("/")
    index, _, visit = place.partition(_VISIT)
    return GroupName(domain, int(index), int(visit or 0))
