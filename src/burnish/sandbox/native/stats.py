"""What a pool can say about itself."""

import bisect
import threading

from burnish.core.records import Record

# Upper ends of the classes, each a tenth of a decade (26 %) above the last: 10 us to 100 s.
_ENDS_S = tuple(1e-5 * 10 ** (step / 10) for step in range(71))


class BoxInfo(Record, frozen=True, kw_only=True):
    """One box that is in use."""

    id: str
    """Of the box."""
    image: str
    """Name, empty for the host's own programs."""
    age_s: float
    """Since it was handed out."""
    num_layers: int
    """Frozen layers above its image."""
    busy: bool
    """Whether something is being done in it."""


class PoolStats(Record, frozen=True, kw_only=True):
    """Counts since the pool was started, and what is there now."""

    live: int
    """Boxes in use."""
    warm: int
    """Boxes that are ready."""
    waiting: int
    """Callers that wait for a box."""
    snapshots: int
    """Snapshots that were not forgotten."""
    created: int
    """Boxes made."""
    destroyed: int
    """Boxes ended after use."""
    creates_failed: int
    """Boxes that could not be made."""
    warm_hits: int
    """Boxes that were ready when they were asked for."""
    helpers_lost: int
    """Helpers that ended by themselves."""
    create_p50_s: float | None
    """Median time to make a box, to within 26 %; None before the first."""
    create_p99_s: float | None
    """99th percentile."""
    exec_p50_s: float | None
    """Median time of a command, to within 26 %."""
    exec_p99_s: float | None
    """99th percentile."""


class Histogram:
    """Durations in classes of equal ratio: fixed memory, one addition per event."""

    def __init__(self) -> None:
        """Start empty."""
        self._counts = [0] * (len(_ENDS_S) + 1)

    def add(self, seconds: float) -> None:
        """Count one."""
        self._counts[bisect.bisect_left(_ENDS_S, seconds)] += 1

    def quantile(self, level: float) -> float | None:
        """Upper end of the class that holds it; None if nothing was counted."""
        total = sum(self._counts)
        if not total:
            return None
        seen = 0
        for index, count in enumerate(self._counts):
            seen += count
            if seen >= level * total:
                return _ENDS_S[min(index, len(_ENDS_S) - 1)]
        return _ENDS_S[-1]


class Tally:
    """Counters of a pool; callbacks of any thread add to them."""

    def __init__(self) -> None:
        """Start at zero."""
        self._lock = threading.Lock()
        self.created = self.destroyed = self.creates_failed = self.warm_hits = 0
        self.helpers_lost = 0
        self.creates = Histogram()
        self.execs = Histogram()

    def made(self, seconds: float, *, failed: bool) -> None:
        """A box was made, or could not be."""
        with self._lock:
            if failed:
                self.creates_failed += 1
            else:
                self.created += 1
                self.creates.add(seconds)

    def ended(self) -> None:
        """A box was ended after use."""
        with self._lock:
            self.destroyed += 1

    def hit(self) -> None:
        """A box was ready."""
        with self._lock:
            self.warm_hits += 1

    def lost(self) -> None:
        """A helper ended by itself."""
        with self._lock:
            self.helpers_lost += 1
