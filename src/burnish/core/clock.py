"""Time as a dependency, so that state machines can be tested without sleeping."""

import time
from typing import Protocol


class Clock(Protocol):
    """Where the time comes from."""

    def now_s(self) -> float:
        """Seconds on a monotonic scale."""
        ...

    def wall_s(self) -> float:
        """Seconds since the epoch, for records that people read."""
        ...


class SystemClock:
    """The machine's clocks."""

    def now_s(self) -> float:
        """Monotonic seconds."""
        return time.monotonic()

    def wall_s(self) -> float:
        """Unix time."""
        return time.time()


class ManualClock:
    """A clock that moves only when told to."""

    def __init__(self, start_s: float = 0.0) -> None:
        """Start at `start_s`."""
        self._now_s = start_s

    def now_s(self) -> float:
        """The set time."""
        return self._now_s

    def wall_s(self) -> float:
        """The set time."""
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Move forward by `seconds` >= 0."""
        assert seconds >= 0
        self._now_s += seconds
