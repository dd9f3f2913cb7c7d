"""Who may have a box now: the limit of a pool or server, fair between clients, over event loops."""

import asyncio
import threading

from burnish.core.errors import ClassifiedFailure
from burnish.core.records import Failure
from burnish.core.vocabulary import FailureKind
from burnish.sandbox.cancellation import resolve
from burnish.sandbox.pooling.fair_queue import FairQueue, Ticket

# Of one client, ours: the queue's bound per client is the bound of all.
_MAX_WAITING = 2**16


class Places:
    """So many boxes may live at once."""

    def __init__(
        self,
        capacity: int,
        *,
        max_waiting: int = _MAX_WAITING,
        max_waiting_per_client: int = _MAX_WAITING,
    ) -> None:
        """Start with all free.

        Args:
            capacity: boxes at once.
            max_waiting: requests that may wait.
            max_waiting_per_client: of one client.
        """
        self._lock = threading.Lock()
        self._queue = FairQueue(
            capacity, max_waiting=max_waiting, max_waiting_per_client=max_waiting_per_client
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

    async def take(self, count: int = 1, client: str = "") -> Ticket:
        """Wait for `count` places, all at once. Cancelled, it has taken none.

        Args:
            count: how many.
            client: with whom others share evenly; see `FairQueue`.

        Raises:
            ValueError: more than there are.
            QueueFull: too many wait already.
            ClassifiedFailure: the pool is closed.
        """
        with self._lock:
            self._check_open()
            ticket = self._queue.offer(client, count)
            future: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
            self._waiting[ticket.number] = future
        # Others may go with it: a newcomer makes the shares smaller, and so the next another.
        self._wake()
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
            raise _closed()
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
            raise _closed()

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


def _closed() -> ClassifiedFailure:
    message = "the pool is closed"
    return ClassifiedFailure(
        Failure(kind=FailureKind.SANDBOX, where="sandbox.pool.acquire", message=message)
    )
