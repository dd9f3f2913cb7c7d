"""Who may have a box now: the pool's limit, first come first served, over event loops."""

import asyncio
import threading

from burnish.sandbox.cancellation import resolve
from burnish.sandbox.native.client import failure
from burnish.sandbox.pooling.fair_queue import FairQueue, Ticket

# One client, ours: the queue's bound per client is the bound of all.
_CLIENT = "pool"
_MAX_WAITING = 2**16


class Places:
    """So many boxes may live at once."""

    def __init__(self, capacity: int) -> None:
        """Start with all free."""
        self._lock = threading.Lock()
        self._queue = FairQueue(
            capacity, max_waiting=_MAX_WAITING, max_waiting_per_client=_MAX_WAITING
        )
        self._waiting: dict[int, asyncio.Future[bool]] = {}
        self._closed = False

    @property
    def num_waiting(self) -> int:
        """Requests that wait."""
        return self._queue.num_waiting

    @property
    def num_taken(self) -> int:
        """Places in use."""
        return self._queue.outstanding

    async def take(self, count: int = 1) -> Ticket:
        """Wait for `count` places, all at once. Cancelled, it has taken none.

        Raises:
            ValueError: more than there are.
            ClassifiedFailure: too many wait already, or the pool is closed.
        """
        with self._lock:
            self._check_open()
            ticket = self._queue.offer(_CLIENT, count)
            if ticket in self._queue.grant():
                return ticket
            future: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
            self._waiting[ticket.number] = future
        try:
            granted = await future
        except asyncio.CancelledError:
            with self._lock:
                self._waiting.pop(ticket.number, None)
                was_waiting = self._queue.cancel(ticket)
            if was_waiting:
                self._wake()
            else:
                self.give_back(ticket)
            raise
        if not granted:
            raise failure("the pool is closed")
        return ticket

    def give_back(self, ticket: Ticket, count: int | None = None) -> None:
        """Free places; by default all of the ticket."""
        with self._lock:
            self._queue.release(ticket, count)
        self._wake()

    def close(self) -> None:
        """Nobody gets a place any more."""
        with self._lock:
            self._closed = True
            waiting = list(self._waiting.values())
            self._waiting.clear()
        for future in waiting:
            resolve(future, False)

    def _check_open(self) -> None:
        if self._closed:
            raise failure("the pool is closed")

    def _wake(self) -> None:
        with self._lock:
            if self._closed:
                return
            granted = self._queue.grant()
            futures = [(self._waiting.pop(ticket.number, None), ticket) for ticket in granted]
        for future, ticket in futures:
            if future is None:
                self.give_back(ticket)
            else:
                resolve(future, True)
