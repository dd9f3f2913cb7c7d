"""A timer that runs out unless it is touched."""

import asyncio
from collections.abc import Callable


class IdleTimer:
    """Calls back once nothing has happened for a while; a touch costs one clock read."""

    def __init__(self, idle_s: float, expired: Callable[[], None]) -> None:
        """Does not run yet."""
        self._idle_s = idle_s
        self._expired = expired
        self._last_s = 0.0
        self._handle: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Run from now on, in the running loop."""
        self.touch()
        self._check()

    def touch(self) -> None:
        """Something happened."""
        self._last_s = asyncio.get_running_loop().time()

    def stop(self) -> None:
        """Do not call back."""
        if self._handle is not None:
            self._handle.cancel()

    def _check(self) -> None:
        loop = asyncio.get_running_loop()
        left_s = self._last_s + self._idle_s - loop.time()
        if left_s > 0:
            self._handle = loop.call_later(left_s, self._check)
        else:
            self._expired()
