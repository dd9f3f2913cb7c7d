"""Who is still there: a session lives as long as it is heard of. Pure; the clock is given."""

from burnish.core.clock import Clock


class Leases:
    """Deadlines of sessions.

    `expired` must be called regularly. When it is called late, as after a suspended machine, the
    clients could not be heard either: that time counts for nobody.
    """

    def __init__(self, clock: Clock, lease_s: float) -> None:
        """Nobody is here yet."""
        self._clock = clock
        self._lease_s = lease_s
        self._deadlines: dict[str, float] = {}
        self._looked_s = clock.now_s()

    def renew(self, session: str) -> None:
        """It was heard of."""
        self._deadlines[session] = self._clock.now_s() + self._lease_s

    def drop(self, session: str) -> None:
        """It has left."""
        self._deadlines.pop(session, None)

    def left_s(self, session: str) -> float:
        """Until it loses its boxes; 0 for one that is not known."""
        deadline = self._deadlines.get(session, 0.0)
        return max(0.0, deadline - self._clock.now_s())

    def expired(self) -> list[str]:
        """Sessions that vanished; they are forgotten."""
        now = self._clock.now_s()
        silence = now - self._looked_s
        self._looked_s = now
        if silence > self._lease_s / 2:
            self._deadlines = {name: at + silence for name, at in self._deadlines.items()}
        gone = [name for name, deadline in self._deadlines.items() if deadline <= now]
        for name in gone:
            del self._deadlines[name]
        return gone
