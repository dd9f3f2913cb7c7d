"""Boxes on loan: each ends at a time unless it is renewed, and ends once."""

import heapq
import math


class Leases:
    """Which boxes are on loan until when.

    A lease that has run out stays until `expired` hands it to the caller, who must destroy the box,
    or the holder gives the box back: whichever comes first gets it, the other one nothing.
    """

    def __init__(self, ttl_s: float) -> None:
        """Start without leases.

        Args:
            ttl_s: how long a lease lasts after it was granted or renewed; `math.inf` for ever.
        """
        assert ttl_s > 0
        self._ttl_s = ttl_s
        self._ends: dict[str, float] = {}
        self._heap: list[tuple[float, str]] = []

    def __len__(self) -> int:
        """Boxes on loan."""
        return len(self._ends)

    def grant(self, box: str, now_s: float, ttl_s: float | None = None) -> float:
        """Begin a lease; returns when it ends."""
        assert box not in self._ends, f"box {box} is on loan already"
        return self._set(box, now_s + (self._ttl_s if ttl_s is None else ttl_s))

    def renew(self, box: str, now_s: float, ttl_s: float | None = None) -> float | None:
        """Let it last `ttl_s` from now, never shorter than before; returns when it ends.

        None if there is no such lease or it has run out: what has run out does not come back, even
        if nobody has collected it yet.
        """
        end = self._ends.get(box)
        if end is None or end <= now_s:
            return None
        return self._set(box, max(end, now_s + (self._ttl_s if ttl_s is None else ttl_s)))

    def release(self, box: str) -> bool:
        """End a lease. True exactly for the one who must free the box."""
        return self._ends.pop(box, None) is not None

    def expired(self, now_s: float) -> list[str]:
        """End and return the leases that have run out, earliest first, each once."""
        found = []
        while self._heap and self._heap[0][0] <= now_s:
            end, box = heapq.heappop(self._heap)
            # Renewed or released since: another entry, or none, is the true one.
            if self._ends.get(box) == end:
                del self._ends[box]
                found.append(box)
        return found

    def next_end_s(self) -> float:
        """When to call `expired` again; `math.inf` if nothing ends."""
        while self._heap and self._ends.get(self._heap[0][1]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else math.inf

    def _set(self, box: str, end_s: float) -> float:
        if self._ends.get(box) != end_s:
            self._ends[box] = end_s
            if end_s < math.inf:
                heapq.heappush(self._heap, (end_s, box))
        if len(self._heap) > 2 * len(self._ends) + 64:
            # Every renewal leaves a dead entry: at most as many as live ones, plus a few.
            self._heap = [(end, box) for box, end in self._ends.items() if end < math.inf]
            heapq.heapify(self._heap)
        return end_s
