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
    owners: set[str]


class KeptSnapshots:
    """A snapshot is there until nobody owns it any more.

    Several may own one: an unchanged box gives the same snapshot again.
    """

    def __init__(self) -> None:
        """None yet."""
        self._kept: dict[str, _Kept] = {}

    def __len__(self) -> int:
        """How many can be named."""
        return len(self._kept)

    def keep(self, snapshot: Snapshot, box: StatefulSandbox, owner: str) -> None:
        """Let it be named until `owner` releases it."""
        self._kept.setdefault(snapshot.id, _Kept(snapshot, box, set())).owners.add(owner)

    def find(self, snapshot_id: str) -> Snapshot | None:
        """The one of that id."""
        kept = self._kept.get(snapshot_id)
        return None if kept is None else kept.snapshot

    async def release(self, owner: str) -> None:
        """An owner is gone."""
        for snapshot_id, kept in tuple(self._kept.items()):
            kept.owners.discard(owner)
            if not kept.owners:
                await self.forget(snapshot_id)

    async def forget(self, snapshot_id: str) -> None:
        """Free it, whoever owns it. Nothing happens if it is not there."""
        kept = self._kept.pop(snapshot_id, None)
        if kept is None:
            return
        try:
            await kept.box.forget(kept.snapshot)
        except (ClassifiedFailure, UserError) as error:  # lost with its helper: gone as well
            _LOG.warning("snapshot %s was not freed in order: %s", snapshot_id, error)
