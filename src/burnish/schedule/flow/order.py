"""Who is served next by a full engine.

1. Turns of episodes under way: their keys and values are warm, and a group ends with its last one.
2. Then whoever's domain has had least of its share (deficit, in shares of a batch).
3. Then the one expected to last longest: of two orders of the same work, longest first ends sooner
   (Graham 1969: at most 4/3 of the best; any order at all: 2).

A request that has waited for `patience_s` comes before all that, oldest first: nobody waits for
ever behind a stream of better claims.
"""

from __future__ import annotations

from typing import NamedTuple

from burnish.schedule.flow.durations import Durations

# An episode expected in the upper half of its domain's lengths, given its siblings.
_TAIL = 0.75


class Waiting(NamedTuple):
    """One request in the queue."""

    request_id: str
    """Which."""
    domain: str
    """Whose."""
    turn: int
    """0 for an episode's first."""
    deficit: float
    """What its domain is owed, in shares of a batch; positive if it had too little."""
    predicted: float
    """Expected length of the episode, tokens."""
    arrived_s: float
    """When it came."""


def rank(waiting: Waiting, now_s: float, patience_s: float = 30.0) -> tuple[float, ...]:
    """Sort key: the smallest is served first."""
    if now_s - waiting.arrived_s >= patience_s:
        return (0.0, waiting.arrived_s)
    if waiting.turn > 0:
        return (1.0, -float(waiting.turn), waiting.arrived_s)
    # A tenth of a batch's share: finer differences are noise, and length decides between them.
    return (2.0, -round(10.0 * waiting.deficit), -waiting.predicted, waiting.arrived_s)


class Lengths:
    """Predicts how long an episode will be: siblings first, else what its domain is like."""

    def __init__(self) -> None:
        """Nothing is known."""
        self._durations = Durations()
        self._longest: dict[str, float] = {}

    def finished(self, domain: str, group_id: str, tokens: float) -> None:
        """A sample of a group ended."""
        self._durations.observe(domain, tokens)
        self._longest[group_id] = max(self._longest.get(group_id, 0.0), tokens)

    def forget(self, group_id: str) -> None:
        """The group is complete or gone."""
        self._longest.pop(group_id, None)

    def predict(self, domain: str, group_id: str, so_far: float = 0.0) -> float:
        """Tokens of an episode in all, given how many it has. 0.0 before anything is known."""
        siblings = self._longest.get(group_id, 0.0)
        if siblings > so_far:
            return siblings
        return self._durations.quantile(domain, _TAIL, so_far)

    def usual(self) -> float:
        """The median over all domains; 0.0 before anything is known."""
        return self._durations.overall(0.5)

    def quantile(self, domain: str, q: float) -> float:
        """Of a domain's lengths."""
        return self._durations.quantile(domain, q)
