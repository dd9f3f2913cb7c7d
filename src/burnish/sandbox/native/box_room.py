"""What a box may store."""

import os
from typing import NamedTuple

from burnish.core.boxes import Limits
from burnish.core.errors import UserError

_PAGE_BYTES = 4096
# Helpers add eight for directories of theirs and of the overlay, and use six.
_SPARE_INODES = 2


class Room(NamedTuple):
    """What a box may store."""

    disk_bytes: int
    num_inodes: int
    shm_bytes: int
    """0: within `disk_bytes`."""


def room_for(limits: Limits) -> Room:
    """What these limits mean; inodes cost memory too, so there is always a bound."""
    inodes = limits.num_inodes
    if inodes is None:
        inodes = max(256, limits.disk_bytes // _PAGE_BYTES)
    return Room(limits.disk_bytes, inodes - _SPARE_INODES, limits.shm_bytes or 0)


def holds_more(found: os.statvfs_result, old: Room, new: Room) -> bool:
    """Whether more is on a disk of one size than fits into another."""
    used_bytes = old.disk_bytes - found.f_bavail * found.f_frsize
    return used_bytes > new.disk_bytes or old.num_inodes - found.f_favail > new.num_inodes


def cannot_change(old: Room, new: Room) -> UserError:
    """A change that ends all processes, where some were to be kept."""
    differ = (name for name, a, b in zip(Room._fields, old, new, strict=True) if a != b)
    name = next(differ)
    return UserError(
        f"limits.{name} cannot change while kept processes run.",
        fix=f"use the same {name} for all commands, or end them by one without keep",
    )


DEFAULT_ROOM = room_for(Limits())
