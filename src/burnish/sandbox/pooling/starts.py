"""How many boxes may be starting at once, and when to stop trying.

Without a cap, a thousand starts at once make every one of them time out. The number in flight
follows additive increase, multiplicative decrease, as it cannot be known how much the host takes:
a failure halves it, and it grows by one after as many successes as it allows.

After several failures in a row the breaker opens: no start for a pause, then a single one as a
probe. Its success closes the breaker; its failure opens it for twice as long.
"""

from enum import StrEnum
from typing import NamedTuple

_FAILURES_TO_OPEN = 5
# Independent failures at 10 % (a loaded host) come five in a row once in 100,000 starts; a broken
# image or a full disk fails every time and is noticed after five.

_FIRST_PAUSE_S = 0.1
# About the slowest native start: shorter would probe before the trouble could have ended.

_MAX_PAUSE_S = 30.0
# A person who frees the disk sees the pool recover within this time.


class Breaker(StrEnum):
    """Whether starts are let through."""

    CLOSED = "closed"
    """Yes, up to the limit."""
    OPEN = "open"
    """No, until the pause ends."""
    PROBING = "probing"
    """One is in flight; what becomes of it decides."""


class Start(NamedTuple):
    """Permission for one start; give it back with `succeeded`, `failed` or `abandoned`."""

    number: int
    epoch: int
    """Starts from before the breaker last changed say nothing about the host now."""


class StartLimiter:
    """Caps starts in flight."""

    def __init__(
        self,
        max_starting: int,
        *,
        failures_to_open: int = _FAILURES_TO_OPEN,
        first_pause_s: float = _FIRST_PAUSE_S,
        max_pause_s: float = _MAX_PAUSE_S,
    ) -> None:
        """Start closed, at the full limit.

        Args:
            max_starting: starts in flight; twice the processors is enough to keep them busy.
            failures_to_open: failures in a row that open the breaker.
            first_pause_s: pause after the first opening; doubles each time in a row.
            max_pause_s: longest pause.
        """
        assert max_starting >= 1
        assert failures_to_open >= 1
        assert 0 < first_pause_s <= max_pause_s
        self._max = max_starting
        self._limit = float(max_starting)
        self._failures_to_open = failures_to_open
        self._first_pause_s = first_pause_s
        self._max_pause_s = max_pause_s
        self._in_flight: dict[int, int] = {}
        self._next = 0
        self._epoch = 0
        self._failures = 0
        self._openings = 0
        self._state = Breaker.CLOSED
        self._retry_s = 0.0

    @property
    def state(self) -> Breaker:
        """Of the breaker; OPEN lasts until the first `try_start` after the pause."""
        return self._state

    @property
    def limit(self) -> int:
        """Starts that may be in flight now, the breaker left aside."""
        return int(self._limit)

    @property
    def in_flight(self) -> int:
        """Starts whose outcome is not known."""
        return len(self._in_flight)

    def retry_s(self) -> float | None:
        """When to try again if the breaker refused; None: when a start ends."""
        return self._retry_s if self._state is Breaker.OPEN else None

    def try_start(self, now_s: float) -> Start | None:
        """Permission for one start, or None."""
        if self._state is Breaker.OPEN and now_s >= self._retry_s:
            if self.in_flight >= self._max:
                return None
            self._change(Breaker.PROBING)
        elif self._state is not Breaker.CLOSED or self.in_flight >= self.limit:
            return None
        start = Start(self._next, self._epoch)
        self._next += 1
        self._in_flight[start.number] = start.epoch
        return start

    def succeeded(self, start: Start) -> None:
        """It came up."""
        if not self._end(start):
            return
        self._failures = 0
        self._openings = 0
        if self._state is Breaker.PROBING:
            self._change(Breaker.CLOSED)
        # 1 / limit for each success: one more for each round of successes.
        self._limit = min(float(self._max), self._limit + 1 / self._limit)

    def failed(self, start: Start, now_s: float) -> None:
        """It did not."""
        if not self._end(start):
            return
        self._failures += 1
        self._limit = max(1.0, self._limit / 2)
        if self._state is Breaker.PROBING or self._failures >= self._failures_to_open:
            # 2^40 pauses are longer than any bound; a larger power would overflow a float.
            pause_s = self._first_pause_s * 2.0 ** min(40, self._openings)
            self._retry_s = now_s + min(self._max_pause_s, pause_s)
            self._openings += 1
            self._failures = 0
            self._change(Breaker.OPEN)

    def abandoned(self, start: Start, now_s: float) -> None:
        """Nobody waited for its end: no verdict. An abandoned probe lets the next one try."""
        if self._end(start) and self._state is Breaker.PROBING:
            self._retry_s = now_s
            self._change(Breaker.OPEN)

    def _end(self, start: Start) -> bool:
        """Free its place; True if its outcome counts."""
        epoch = self._in_flight.pop(start.number, None)
        assert epoch is not None, f"{start} ended twice"
        return epoch == self._epoch

    def _change(self, state: Breaker) -> None:
        self._state = state
        self._epoch += 1
