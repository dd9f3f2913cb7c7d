"""Boxes that are ready before anybody asks, by kind and image."""

import threading
import time
from collections import deque
from collections.abc import Callable

from burnish.sandbox.native.making import Making
from burnish.sandbox.native.station import Kind, Station
from burnish.sandbox.pooling.warm import WarmTargets

_RECKON_EVERY_S = 0.05
"""Between two looks at how many boxes to keep: demand does not change faster, and it takes time."""

Key = tuple[Station, Kind]


class WarmBoxes:
    """Kept filled off the path of whoever takes one: the helper works while they go on."""

    def __init__(self, budget: int, on_made: Callable[[Making], None]) -> None:
        """`budget` bounds all kinds together; 0: none are kept."""
        self._budget = budget
        self._on_made = on_made
        self._lock = threading.Lock()
        self._demand: WarmTargets[Key] = WarmTargets(budget)
        self._targets: dict[Key, int] = {}
        self._reckoned_s = -1.0
        self._ready: dict[Key, deque[Making]] = {}

    def __len__(self) -> int:
        """How many are ready now."""
        with self._lock:
            kept = [(station, boxes) for (station, _), boxes in self._ready.items()]
        for station, _ in kept:
            station.helper.poll()
        return sum(making.is_there for _, boxes in kept for making in list(boxes))

    def take(self, key: Key) -> Making | None:
        """One that is ready or on its way, oldest first."""
        if not self._budget:
            return None
        station, _ = key
        station.helper.poll()
        useless = []
        found: Making | None = None
        with self._lock:
            boxes = self._ready.get(key)
            while boxes and found is None:
                making = boxes.popleft()
                if making.failed or making.number in station.helper.died:
                    useless.append(making)
                else:
                    found = making
        for making in useless:
            making.abandon()
        return found

    def asked(self, key: Key, count: int = 1) -> None:
        """Somebody took `count`. Call `fill` when they have what they wanted at once."""
        if self._budget:
            with self._lock:
                self._demand.observe_arrival(key, time.monotonic(), count)

    def fill(self, key: Key) -> None:
        """Make up for what was taken, and adapt to what is asked for."""
        if not self._budget or not key[0].alive:
            return
        now_s = time.monotonic()
        surplus: list[Making] = []
        with self._lock:
            if key not in self._targets or now_s - self._reckoned_s > _RECKON_EVERY_S:
                self._targets = self._demand.targets(now_s)
                self._targets.setdefault(key, 0)
                self._reckoned_s = now_s
                surplus = self._surplus()
            missing = self._targets[key] - len(self._ready.setdefault(key, deque()))
        for making in surplus:
            making.abandon()
        for _ in range(missing):
            self._add(key)

    def _add(self, key: Key) -> None:
        station, kind = key
        try:
            group = station.take_group()
        except OSError:
            # The host is out of something; whoever needs a box now will be told.
            return
        making = station.make(kind, group, on_made=lambda making: self._made(key, making))
        with self._lock:
            self._ready.setdefault(key, deque()).append(making)

    def _made(self, key: Key, making: Making) -> None:
        if not making.failed:
            with self._lock:
                self._demand.observe_create(key, making.took_s)
        self._on_made(making)

    def _surplus(self) -> list[Making]:
        """Take out what is above the targets, newest first. The lock is held."""
        out = []
        for key, boxes in self._ready.items():
            while len(boxes) > self._targets.get(key, 0):
                out.append(boxes.pop())
        return out

    def forget(self, station: Station) -> None:
        """End all boxes of a station."""
        with self._lock:
            keys = [key for key in self._ready if key[0] is station]
            gone = [making for key in keys for making in self._ready.pop(key)]
            for key in keys:
                self._targets.pop(key, None)
        for making in gone:
            making.abandon()
