"""Who is still thinking: lets an engine wait until every live episode has asked for its next turn.

In deterministic mode the batch must not depend on the wall clock. An engine with a barrier starts a
wave only when each live episode has exactly one request pending, and answers all of them together.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock


class Barrier:
    """Counts live episodes. Thread-safe; knows nothing of what waits on it.

    Enter every episode of a batch before any of them generates, and enter a successor before its
    predecessor leaves: an episode that enters late may miss a wave, which depends on the clock.
    """

    def __init__(self) -> None:
        """Nobody is live."""
        self._lock = Lock()
        self._num_live = 0
        self._num_quiet = 0
        self._listeners: list[Callable[[], None]] = []

    @property
    def num_live(self) -> int:
        """Episodes that have entered and not left."""
        with self._lock:
            return self._num_live

    @property
    def num_quiet(self) -> int:
        """How many times the last live episode has left."""
        with self._lock:
            return self._num_quiet

    def enter(self) -> None:
        """An episode begins: from now on waves wait for its requests."""
        with self._lock:
            self._num_live += 1

    def leave(self) -> None:
        """An episode will ask for nothing more."""
        with self._lock:
            assert self._num_live > 0, "leave() without enter()"
            self._num_live -= 1
            self._num_quiet += self._num_live == 0
            listeners = tuple(self._listeners)
        for listener in listeners:
            listener()

    @contextmanager
    def episode(self) -> Iterator[None]:
        """Enter, and leave whatever happens."""
        self.enter()
        try:
            yield
        finally:
            self.leave()

    def subscribe(self, listener: Callable[[], None]) -> None:
        """Call `listener` after every `leave`, from the leaving thread."""
        with self._lock:
            self._listeners.append(listener)
