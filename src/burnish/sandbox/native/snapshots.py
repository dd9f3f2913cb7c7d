"""Which snapshots exist and what keeps their layers alive."""

import itertools
import threading
from typing import NamedTuple

from burnish.core.boxes import Snapshot
from burnish.core.errors import UserError
from burnish.sandbox.native.station import Station


class Frozen(NamedTuple):
    """What a snapshot stands for."""

    station: Station
    hold: int


class SnapshotBook:
    """The snapshots of a pool. They live until they are forgotten, or the pool closes."""

    def __init__(self, pool_id: str) -> None:
        """Start without any."""
        self._pool_id = pool_id
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._frozen: dict[str, Frozen] = {}

    def __len__(self) -> int:
        """How many there are."""
        return len(self._frozen)

    def __contains__(self, snapshot: Snapshot) -> bool:
        """Whether it was not forgotten."""
        return snapshot.id in self._frozen

    def add(self, station: Station, hold: int) -> Snapshot:
        """Remember what `hold` stands for now."""
        frozen = Frozen(station, station.hold(hold))
        name = f"{self._pool_id}-{next(self._numbers)}"
        with self._lock:
            self._frozen[name] = frozen
        return Snapshot(
            id=name,
            image=station.image.name if station.image else "",
            num_layers=len(station.stack(frozen.hold)),
        )

    def find(self, snapshot: Snapshot, station: Station) -> int:
        """The hold of a snapshot that boxes of this station can use.

        Raises:
            UserError: of another pool or image, forgotten, or lost with its helper.
        """
        with self._lock:
            frozen = self._frozen.get(snapshot.id)
        if frozen is None or not frozen.station.alive:
            raise UserError(
                f"there is no snapshot {snapshot.id} in this pool any more.",
                fix="use snapshots that this pool made since its helper was started",
            )
        if frozen.station is not station:
            raise UserError(
                f"snapshot {snapshot.id} is of image {snapshot.image or 'of the host'!r}, the box "
                f"is of {station.image.name if station.image else 'the host'!r}.",
                fix="use a box of the same image",
            )
        return frozen.hold

    def lost(self, station: Station) -> None:
        """A helper has ended, and with it the layers of all its snapshots."""
        with self._lock:
            self._frozen = {
                name: frozen
                for name, frozen in self._frozen.items()
                if frozen.station is not station
            }

    def forget(self, snapshot: Snapshot) -> None:
        """Free what only this snapshot needs. Nothing happens if it is not there."""
        with self._lock:
            frozen = self._frozen.pop(snapshot.id, None)
        if frozen is not None:
            frozen.station.let_go(frozen.hold)
