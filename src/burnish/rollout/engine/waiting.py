"""Who waits, and who is next.

A request's place is fixed when it arrives, so that thousands can wait in a heap:

    key = step of arrival                        first come, first served
          - ageing * priority                    a level is worth `ageing` steps of waiting
          - ageing, if its session goes on       later turns before new episodes
          + ageing / 16 * backlog                of its own session: nobody fills the queue alone

Steps are the engine's own, never the wall clock. Nothing starves: whatever arrives more than
`ageing * (levels + 1)` steps later comes later.

A request whose next page another one is about to compute is parked at that one, its leader, and
comes back when the leader has computed what both share: no step looks at it in vain.
"""

import heapq
from collections import OrderedDict, defaultdict
from collections.abc import Iterator

from burnish.rollout.engine.sequence import Sequence

# Sessions that have ended are not announced: the oldest of this many are forgotten.
_MOST_SESSIONS = 1 << 16
_BACKLOG_SHARE = 16


class WaitingQueue:
    """Requests that hold no place in the batch."""

    def __init__(self, ageing_steps: int) -> None:
        """Empty; a level of priority is worth `ageing_steps` steps of waiting."""
        assert ageing_steps > 0
        self._ageing = ageing_steps
        # The push number keeps two entries of one request, one of them stale, from being compared.
        self._heap: list[tuple[tuple[int, int], int, Sequence]] = []
        self._waiting: dict[Sequence, None] = {}
        self._leader_of: dict[Sequence, Sequence] = {}
        self._followers: dict[Sequence, list[tuple[int, int, Sequence]]] = {}
        self._sessions: OrderedDict[str, None] = OrderedDict()
        self._backlog: dict[str, int] = defaultdict(int)
        self._num_added = self._num_pushed = 0

    def __len__(self) -> int:
        return len(self._waiting) + len(self._leader_of)

    def __contains__(self, sequence: object) -> bool:
        return sequence in self._waiting or sequence in self._leader_of

    def __iter__(self) -> Iterator[Sequence]:
        """All that wait, in no order."""
        yield from self._waiting
        yield from self._leader_of

    def add(self, sequence: Sequence, step: int) -> None:
        """A new request arrives: fix its place."""
        request, ageing = sequence.request, self._ageing
        key = step - ageing * request.priority
        session = request.session_id
        if session is not None:
            key += ageing * self._backlog[session] // _BACKLOG_SHARE
            if session in self._sessions:
                key -= ageing
        sequence.key, sequence.order = key, self._num_added
        self._num_added += 1
        self.push(sequence)

    def push(self, sequence: Sequence) -> None:
        """Wait at the place that was fixed on arrival."""
        self._waiting[sequence] = None
        self._count(sequence, 1)
        self._num_pushed += 1
        heapq.heappush(self._heap, (sequence.rank, self._num_pushed, sequence))

    def head(self) -> Sequence | None:
        """Who is next, left in its place."""
        while self._heap and self._heap[0][2] not in self._waiting:
            heapq.heappop(self._heap)
        return self._heap[0][2] if self._heap else None

    def park(self, sequence: Sequence, leader: Sequence, num_tokens: int) -> None:
        """Wait until `leader` has computed so many tokens, not for a place."""
        del self._waiting[sequence]
        self._leader_of[sequence] = leader
        self._num_pushed += 1
        entry = (num_tokens, self._num_pushed, sequence)
        heapq.heappush(self._followers.setdefault(leader, []), entry)

    def leads(self, sequence: Sequence) -> bool:
        """Whether anybody waits for this one."""
        return sequence in self._followers

    def unpark(self, leader: Sequence, num_tokens: int | None = None) -> None:
        """The leader has computed so many tokens, or (None) is done: followers compete again."""
        followers = self._followers.get(leader)
        if followers is None:
            return
        while followers and (num_tokens is None or followers[0][0] <= num_tokens):
            sequence = heapq.heappop(followers)[2]
            if self._leader_of.get(sequence) is leader:
                del self._leader_of[sequence]
                self._count(sequence, -1)
                self.push(sequence)
        if not followers:
            del self._followers[leader]

    def remove(self, sequence: Sequence) -> None:
        """It starts or is given up."""
        if sequence in self._waiting:
            del self._waiting[sequence]
        else:
            del self._leader_of[sequence]
        self._count(sequence, -1)
        if len(self._heap) > 64 + 2 * len(self._waiting):
            # Given up within the heap: dropped before they outnumber those that wait.
            self._heap = [(s.rank, 0, s) for s in self._waiting]
            heapq.heapify(self._heap)

    def remember_session(self, session: str | None) -> None:
        """A turn of `session` has been answered: the next one goes on with it."""
        if session is None:
            return
        self._sessions[session] = None
        self._sessions.move_to_end(session)
        if len(self._sessions) > _MOST_SESSIONS:
            self._sessions.popitem(last=False)

    def forget_sessions(self) -> None:
        """No session is known any more."""
        self._sessions.clear()

    def _count(self, sequence: Sequence, more: int) -> None:
        session = sequence.request.session_id
        if session is not None:
            self._backlog[session] += more
            if not self._backlog[session]:
                del self._backlog[session]
