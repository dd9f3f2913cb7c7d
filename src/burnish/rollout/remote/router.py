"""Which replica takes a request: the least loaded one, and the same one for a session if it may.

Pure: what is known about the replicas comes in, an index goes out. A session's keys and values lie
on the replica that answered it last, so its next turn goes there, unless that one has so much more
to do than the idlest that waiting would cost more than computing the prefix again.
"""

from collections import OrderedDict
from collections.abc import Sequence

# A session leaves its replica when that one runs over twice the least load and eight requests
# more: below that a queue is shorter than the prefill of a long history.
_SLACK_RATIO = 2
_SLACK_REQUESTS = 8


class Router:
    """Remembers where sessions went."""

    def __init__(self, max_sessions: int = 65536) -> None:
        """Forget the longest unused session beyond `max_sessions`."""
        self._max_sessions = max_sessions
        self._home: OrderedDict[str, int] = OrderedDict()

    def pick(self, loads: Sequence[int | None], session_id: str | None) -> int | None:
        """The index of a replica, or None if there is none.

        Args:
            loads: requests in flight on each replica; None: it takes none now.
            session_id: names an episode whose turns should stay together.
        """
        known = [(load, index) for index, load in enumerate(loads) if load is not None]
        if not known:
            return None
        least, idlest = min(known)
        chosen = idlest
        if session_id is not None:
            home = self._home.get(session_id)
            if home is not None and home < len(loads):
                load = loads[home]
                if load is not None and load <= _SLACK_RATIO * least + _SLACK_REQUESTS:
                    chosen = home
            self._home[session_id] = chosen
            self._home.move_to_end(session_id)
            while len(self._home) > self._max_sessions:
                self._home.popitem(last=False)
        return chosen
