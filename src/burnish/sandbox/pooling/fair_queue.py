"""Who gets the next box: no client above its share while another is below, fair over grants else.

The share of client i of weight w_i is capacity * w_i / (sum of w over all that hold or wait), at
least one. The request at the head of its line, of n units, is next if it comes first among

1. requests that leave their client within its share, and those of clients that hold nothing;
2. if there are none of the former: those of clients that hold nothing, and that of the client that
   holds least (in units / w): what others leave of their shares is divided evenly too.

So a client with ten thousand requests delays another by one release, not by ten thousand. Who holds
its share and wants more waits for as long as others want theirs.

What comes first is said by start-time fair queueing (Goyal, Vin, Cheng 1996, section 2). Deficit
round robin shares as well but needs a quantum as large as the largest batch, and bursts of that
size come with it. The request has

    start  S = max(V, F_i)        finish  F_i = S + n / w_i

V is the start of the last grant. The least S goes first (ties: who asked first). Where one grant
is given back before the next, the units granted to two clients, while both wait, differ by no more
than one request of each:

    | W_i / w_i  -  W_j / w_j |  <=  max n_i / w_i  +  max n_j / w_j

Where they are held side by side the shares decide, and this bounds nothing.

A batch is granted whole. If it is next and does not fit, everybody waits until enough was released:
passing it would starve it. So the first request of a client that holds nothing waits for at most

    sum over other clients j of  w_j * max n_i / w_i  +  max n_j   units granted before it,

and then for those releases. A batch that cannot fit before its own client releases something holds
up nobody. Clients that neither wait nor hold are forgotten when nobody waits, and V starts anew
when there are none. How long a box is kept is bounded by leases.
"""

from collections import OrderedDict
from typing import NamedTuple

from burnish.core.errors import ClassifiedFailure
from burnish.core.records import Failure
from burnish.core.vocabulary import FailureKind


class QueueFull(ClassifiedFailure):
    """Too many are waiting: come back later. Nothing was queued."""

    def __init__(self, client: str, num_waiting: int, limit: int) -> None:
        """Say who waits for what."""
        self.client = client
        self.num_waiting = num_waiting
        self.limit = limit
        message = f"{num_waiting} requests for boxes are waiting and {limit} may: try again later"
        super().__init__(
            Failure(kind=FailureKind.SANDBOX, where="sandbox.pool.acquire", message=message)
        )


class Ticket(NamedTuple):
    """A request for boxes."""

    number: int
    """Unique in its queue, ascending."""
    client: str
    """Who asked."""
    units: int
    """Boxes, all or none."""


class _Client:
    __slots__ = ("finish", "held", "line", "weight")

    def __init__(self) -> None:
        self.line: OrderedDict[int, Ticket] = OrderedDict()
        self.held = 0
        self.finish = 0.0
        self.weight = 1.0


class _Next(NamedTuple):
    """The head of a line."""

    start: float
    number: int
    client: _Client
    ticket: Ticket

    def by_grants(self) -> tuple[float, int]:
        return self.start, self.number

    def by_holding(self) -> tuple[float, float, int]:
        return self.client.held / self.client.weight, self.start, self.number


class FairQueue:
    """Hands out `capacity` units. Call `grant` after `offer`, `release`, `cancel` and `resize`."""

    def __init__(
        self, capacity: int, *, max_waiting: int = 4096, max_waiting_per_client: int | None = None
    ) -> None:
        """Start with all units free.

        Args:
            capacity: units outstanding at once.
            max_waiting: requests waiting at once. 4096 is the most boxes that a pool may have: more
                waiters than that wait for a second generation, which is better told to come later.
            max_waiting_per_client: of one client; by default half, so that no client alone can
                have the others refused.
        """
        assert capacity >= 1
        assert max_waiting >= 1
        self._capacity = capacity
        self._max_waiting = max_waiting
        self._max_per_client = max_waiting_per_client or max(1, max_waiting // 2)
        self._clients: dict[str, _Client] = {}
        self._granted: dict[int, int] = {}
        self._num_waiting = 0
        self._outstanding = 0
        self._next_number = 0
        self._virtual = 0.0

    @property
    def capacity(self) -> int:
        """Units outstanding at once."""
        return self._capacity

    @property
    def outstanding(self) -> int:
        """Units granted and not released; above the capacity only after it was lowered."""
        return self._outstanding

    @property
    def num_waiting(self) -> int:
        """Requests that wait."""
        return self._num_waiting

    def offer(self, client: str, count: int = 1, weight: float = 1.0) -> Ticket:
        """Queue a request.

        Args:
            client: whose line it joins.
            count: units, all or none.
            weight: share of this client relative to others; the latest counts.

        Raises:
            QueueFull: too many wait, in all or of this client.
            ValueError: more units than there are, or a weight out of [0.001, 1000].
        """
        if not 1 <= count <= self._capacity:
            raise ValueError(f"asked for {count} boxes at once: 1 to {self._capacity} can be had")
        # Finer differences than a thousandfold are no fairness but priority, and starve.
        if not 0.001 <= weight <= 1000:
            raise ValueError(f"weight is {weight}: it must be between 0.001 and 1000")
        known = self._clients.get(client)
        own = len(known.line) if known else 0
        if self._num_waiting >= self._max_waiting:
            raise QueueFull(client, self._num_waiting, self._max_waiting)
        if own >= self._max_per_client:
            raise QueueFull(client, own, self._max_per_client)
        ticket = Ticket(self._next_number, client, count)
        self._next_number += 1
        self._num_waiting += 1
        entry = self._clients.setdefault(client, _Client())
        entry.weight = weight
        entry.line[ticket.number] = ticket
        return ticket

    def grant(self) -> list[Ticket]:
        """Requests that may go now, in order. Each is granted once."""
        if not self._num_waiting:
            return []
        granted = []
        while (chosen := self._first()) is not None:
            start, _, client, ticket = chosen
            if ticket.units > self._capacity - self._outstanding:
                break
            del client.line[ticket.number]
            self._virtual = start
            client.finish = start + ticket.units / client.weight
            self._granted[ticket.number] = ticket.units
            self._num_waiting -= 1
            self._outstanding += ticket.units
            client.held += ticket.units
            granted.append(ticket)
        self._forget()
        return granted

    def cancel(self, ticket: Ticket) -> bool:
        """Take back a waiting request; False if it was granted before (then release it)."""
        client = self._clients.get(ticket.client)
        if client is None or client.line.pop(ticket.number, None) is None:
            return False
        self._num_waiting -= 1
        self._forget()
        return True

    def release(self, ticket: Ticket, count: int | None = None) -> None:
        """Give back `count` units of a granted request; by default all that are left."""
        left = self._granted.get(ticket.number, 0)
        count = left if count is None else count
        assert 0 < count <= left, f"released {count} units of {ticket}, which holds {left}"
        self._outstanding -= count
        self._clients[ticket.client].held -= count
        if left == count:
            del self._granted[ticket.number]
            self._forget()
        else:
            self._granted[ticket.number] = left - count

    def resize(self, capacity: int) -> list[Ticket]:
        """Change the capacity; returns waiting requests that can never be met now (cancelled)."""
        assert capacity >= 1
        self._capacity = capacity
        hopeless = [
            ticket
            for client in self._clients.values()
            for ticket in client.line.values()
            if ticket.units > capacity
        ]
        for ticket in hopeless:
            self.cancel(ticket)
        return hopeless

    def _first(self) -> _Next | None:
        """The waiting request that is next."""
        total = sum(client.weight for client in self._clients.values())
        within, first, above = [], [], []
        for client in self._clients.values():
            if not client.line:
                continue
            ticket = next(iter(client.line.values()))
            found = _Next(max(self._virtual, client.finish), ticket.number, client, ticket)
            wanted = client.held + ticket.units
            if wanted == 1 or wanted * total <= self._capacity * client.weight:
                within.append(found)
            elif not client.held:
                first.append(found)
            elif wanted <= self._capacity:
                above.append(found)
        if not within and above:
            within = [min(above, key=_Next.by_holding)]
        return min(within + first, key=_Next.by_grants, default=None)

    def _forget(self) -> None:
        """Drop clients whose past has no influence any more, so that names cannot pile up."""
        done = [
            name
            for name, client in self._clients.items()
            if not (client.line or client.held)
            and (client.finish <= self._virtual or not self._num_waiting)
        ]
        for name in done:
            del self._clients[name]
        if not self._clients:
            self._virtual = 0.0
