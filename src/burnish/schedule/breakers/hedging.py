"""When to ask a second time without waiting for the first answer: resets, boxes, judges.

Never for generations: the first of two samples to finish is the shorter one, so racing them
selects short answers (invariant 6). A call that has outlasted the 95th percentile of its kind is
asked again; the first answer wins (Dean and Barroso, "The tail at scale", CACM 2013).
"""

from __future__ import annotations

from burnish.schedule.flow.durations import Durations

_QUANTILE = 0.95
# Calls before the quantile means something: the 95th percentile of fewer is their maximum.
_MIN_CALLS = 40
# Second calls per first call: at a quantile of 0.95 five in a hundred would ask again, and twice
# that only when everything is slow, which is when a hedge makes it worse.
_BUDGET_RATIO = 0.05
_BURST = 4.0


class Hedges:
    """Delays per kind of call, learned; and a budget."""

    def __init__(self) -> None:
        """Nothing is known, so nothing is hedged."""
        self._durations = Durations(min_count=_MIN_CALLS)
        self._tokens = _BURST
        self.num_hedged = 0

    def answered(self, call: str, seconds: float) -> None:
        """The first answer came after so long."""
        self._durations.observe(call, seconds)
        self._tokens = min(self._tokens + _BUDGET_RATIO, _BURST)

    def delay_s(self, call: str) -> float | None:
        """Ask again after so long; None: not at all."""
        if self._tokens < 1.0 or self._durations.count(call) < _MIN_CALLS:
            return None
        return self._durations.quantile(call, _QUANTILE)

    def asked_again(self) -> None:
        """A second call was made."""
        self._tokens -= 1.0
        self.num_hedged += 1
