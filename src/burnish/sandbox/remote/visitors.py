"""Connections of a server: how many, whose, and which may not stay. Pure; the clock is given.

    accepted --> head awaited --> in hand --> idle --> head awaited ...
                 `head_s`         `stall_s` for each piece of the body

Who takes longer is closed; a stranger may not idle longer than `head_s` either. A stranger has sent
no request with a valid token yet. Where there is no room for one more, strangers go first, the
oldest of them before the others: whoever has a token shows it within moments.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from burnish.core.clock import Clock
from burnish.sandbox.remote.messages import ProblemKind
from burnish.sandbox.remote.problems import Refused


class Visit:
    """One connection."""

    __slots__ = ("close", "deadline_s", "due", "heard_s", "user")

    def __init__(self, close: Callable[[], object], now_s: float, head_s: float) -> None:
        """It was just accepted."""
        self.close = close
        """Ends it at once; what is counted goes with `Visitors.left`."""
        self.user: str | None = None
        """None: a stranger."""
        self.heard_s = now_s
        """When bytes came."""
        self.deadline_s: float | None = now_s + head_s
        """By then a request must have come; None: none is awaited."""
        self.due: Callable[[], bool] | None = None
        """Whether the client could send more of the request in hand; None: none is."""


class Visitors:
    """All connections of a server."""

    def __init__(self, clock: Clock, *, head_s: float, stall_s: float) -> None:
        """Nobody is here; see `ServeConfig` for the meanings."""
        self._clock = clock
        self._head_s = head_s
        self._stall_s = stall_s
        self._visits: dict[Visit, None] = {}
        self.most = 2**31
        """More are not let in; a named user may have half of them."""

    def __len__(self) -> int:
        """Connections that are open."""
        return len(self._visits)

    def come(self, close: Callable[[], object]) -> Visit | None:
        """Let one in; None: it must go, as there is no room and nobody who could be sent away."""
        if len(self._visits) >= self.most:
            going = self._stranger() or self._idle_of_most()
            if going is None:
                return None
            self._send_away(going)
        visit = Visit(close, self._clock.now_s(), self._head_s)
        self._visits[visit] = None
        return visit

    def left(self, visit: Visit) -> None:
        """It is closed; may be called twice."""
        self._visits.pop(visit, None)

    def heard(self, visit: Visit) -> None:
        """Bytes came."""
        visit.heard_s = self._clock.now_s()
        if visit.due is None and visit.deadline_s is None:
            visit.deadline_s = visit.heard_s + self._head_s

    @contextmanager
    def asking(self, visit: Visit, due: Callable[[], bool]) -> Iterator[None]:
        """While a request is in hand, whose head has come."""
        visit.due, visit.deadline_s, visit.heard_s = due, None, self._clock.now_s()
        try:
            yield
        finally:
            visit.due = None
            # Also the time that strangers have to take their answer.
            visit.deadline_s = self._clock.now_s() + self._head_s if visit.user is None else None

    def know(self, visit: Visit, user: str) -> None:
        """The request in hand is from this user.

        Raises:
            Refused: the user has too many; this one stays a stranger's.
        """
        if visit.user == user:
            return
        of_user = [other for other in self._visits if other.user == user]
        if user and len(of_user) >= self.most // 2:
            idle = next((other for other in of_user if other.due is None), None)
            if idle is None:
                what = f"{user} has {len(of_user)} connections with a request on each already"
                raise Refused(ProblemKind.BUSY, what)
            self._send_away(idle)
        visit.user = user

    def tend(self) -> None:
        """Close those who are too slow. To be called regularly."""
        now = self._clock.now_s()
        for visit in tuple(self._visits):
            if visit.due is not None:
                if not visit.due():
                    visit.heard_s = now
                late = now - visit.heard_s >= self._stall_s
            else:
                late = visit.deadline_s is not None and now >= visit.deadline_s
            if late:
                self._send_away(visit)

    def _stranger(self) -> Visit | None:
        return next((visit for visit in self._visits if visit.user is None), None)

    def _idle_of_most(self) -> Visit | None:
        """The next request of its client opens another one; of one that has many, first."""
        counts = Counter(visit.user for visit in self._visits)
        idle = [visit for visit in self._visits if visit.due is None and visit.deadline_s is None]
        return max(idle, key=lambda visit: counts[visit.user], default=None)

    def _send_away(self, visit: Visit) -> None:
        # It counts no more at once, though the loop closes its descriptor a turn later.
        self.left(visit)
        visit.close()
