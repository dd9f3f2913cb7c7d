"""Which snapshots of a server clients can name, and for how long."""

import logging
from typing import NamedTuple

from burnish.core.boxes import Snapshot, StatefulSandbox
from burnish.core.errors import ClassifiedFailure, UserError

_LOG = logging.getLogger(__name__)


class _Kept(NamedTuple):
    snapshot: Snapshot
    box: StatefulSandbox
    """Any of the pool, even one that was destroyed, can forget it."""
    owners: dict[str, str]
    """With their users."""


class KeptSnapshots:
    """A snapshot is there until nobody owns it any more.

    Several may own one: an unchanged box gives the same snapshot again. A user sees those that an
    owner of this user keeps.
    """

    def __init__(self) -> None:
        """None yet."""
        self._kept: dict[str, _Kept] = {}

    def __len__(self) -> int:
        """How many can be named."""
        return len(self._kept)

    def keep(self, snapshot: Snapshot, box: StatefulSandbox, owner: str, user: str) -> None:
        """Let the user name it until `owner` releases it."""
        kept = self._kept.setdefault(snapshot.id, _Kept(snapshot, box, {}))
        kept.owners[owner] = user

    def find(self, snapshot_id: str, user: str) -> Snapshot | None:
        """The one of that id, if the user may see it."""
        kept = self._kept.get(snapshot_id)
        return kept.snapshot if kept is not None and user in kept.owners.values() else None

    async def release(self, owner: str) -> None:
        """An owner is gone."""
        for snapshot_id, kept in tuple(self._kept.items()):
            kept.owners.pop(owner, None)
            await self._free_if_left(snapshot_id)

    async def forget(self, snapshot_id: str, user: str) -> None:
        """No owner of this user keeps it any more. Nothing happens if it is not there."""
        kept = self._kept.get(snapshot_id)
        if kept is not None:
            for owner in [owner for owner, whose in kept.owners.items() if whose == user]:
                del kept.owners[owner]
            await self._free_if_left(snapshot_id)

    async def _free_if_left(self, snapshot_id: str) -> None:
        kept = self._kept.get(snapshot_id)
        if kept is None or kept.owners:
            return
        del self._kept[snapshot_id]
        try:
            await kept.box.forget(kept.snapshot)
        except (ClassifiedFailure, UserError) as error:  # lost with its helper: gone as well
            _LOG.warning("snapshot %s was not freed in order: %s", snapshot_id, error)
