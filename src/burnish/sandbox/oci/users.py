"""Who a box is on the host and inside."""

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from burnish.core.errors import UserError
from burnish.sandbox.commands import INSIDE_ID
from burnish.sandbox.images.running import ImageUser
from burnish.sandbox.keeper.namespace import Identity
from burnish.sandbox.oci.runtime import Runtime
from burnish.sandbox.oci.spec import IdMapping

# Users of boxes, two for each; unused on any host we know of.
_FIRST_JOB_ID, _FIRST_ROOT_ID = 1_900_000_000, 1_950_000_000
_SPARE = (65534, 65533)


class BoxUsers(NamedTuple):
    """Who a box is."""

    identity: Identity | None
    """Owner of its files outside; None: ourselves."""
    inside: ImageUser
    """Whom its commands see themselves as."""
    uid_map: tuple[IdMapping, ...]
    """Users of its namespace."""
    gid_map: tuple[IdMapping, ...]
    """Groups of it."""


def box_users(
    runtime: Runtime,
    slot: int,
    *,
    privileged: bool,
    user: ImageUser | None = None,
    uid_map: str | None = None,
) -> BoxUsers:
    """Who a box is on the host and inside.

    Root hands each box to two users that own nothing: one runs its programs, one is what the
    runtime needs as the box's root. An ordinary user has one id only.

    Args:
        runtime: some insist on a user 0 in the box.
        slot: number of the box.
        privileged: we are root outside any namespace of ours.
        user: whom its image names.
        uid_map: `/proc/self/uid_map`.

    Raises:
        UserError: there is no id for this user.
    """
    if privileged:
        text = uid_map or Path("/proc/self/uid_map").read_text(encoding="ascii")
        ranges = [[int(field) for field in line.split()] for line in text.splitlines()]
        inside = user or ImageUser(INSIDE_ID, INSIDE_ID)
        for job, root in ((_FIRST_JOB_ID + slot, _FIRST_ROOT_ID + slot), _SPARE):
            if all(any(a <= n < a + count for a, _, count in ranges) for n in (job, root)):
                maps = (_map(_with_root(number, job, root)) for number in inside)
                return BoxUsers(Identity(job, job), inside, *maps)
    inside = user or (ImageUser(0, 0) if runtime.needs_root_id else ImageUser(INSIDE_ID, INSIDE_ID))
    if runtime.needs_root_id and inside != (0, 0):
        raise UserError(
            f"the image runs as user {inside.uid}:{inside.gid}, and boxes of {runtime.name} have "
            "one id here, root.",
            fix="use crun, podman with a range in /etc/subuid, or an image that runs as root",
        )
    return BoxUsers(None, inside, *(_map([(number, 0)]) for number in inside))


def _with_root(number: int, job: int, root: int) -> list[tuple[int, int]]:
    """Inside and outside; a box whose programs are root needs no other."""
    return [(0, job)] if number == 0 else [(0, root), (number, job)]


def _map(pairs: Iterable[tuple[int, int]]) -> tuple[IdMapping, ...]:
    return tuple(IdMapping(container_id=a, host_id=b, size=1) for a, b in pairs)
