"""Boxes that were frozen early: their files are a layer while their processes are still ending."""

import asyncio
import threading
from collections.abc import Callable

from burnish.sandbox.cancellation import resolve


class Fading:
    """Whose end is still to be reported. Usable from any thread and loop."""

    def __init__(self) -> None:
        """Start without any."""
        self._lock = threading.Lock()
        self._waiters: dict[int, Callable[[], None] | None] = {}

    def add(self, box: int) -> None:
        """Before it is frozen, as its end may be reported right after."""
        with self._lock:
            self._waiters[box] = None

    def ended(self, box: int) -> bool:
        """No process of it is left, or it was not frozen; whether it was in here."""
        with self._lock:
            known = box in self._waiters
            waiter = self._waiters.pop(box, None)
        if waiter is not None:
            waiter()
        return known

    def all_ended(self) -> None:
        """With their helper."""
        for box in list(self._waiters):
            self.ended(box)

    def end_of(self, box: int) -> asyncio.Future[None] | None:
        """Done when no process of it is left; None if that is so. May be asked for again."""
        with self._lock:
            if box not in self._waiters:
                return None
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters[box] = lambda: resolve(future, None)
            return future
