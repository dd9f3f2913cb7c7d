"""Boxes that are on their way."""

import asyncio
import contextlib
import threading
import time
from typing import TYPE_CHECKING

from burnish.core.errors import ClassifiedFailure
from burnish.sandbox.cancellation import resolve
from burnish.sandbox.cgroup_files import BoxGroup
from burnish.sandbox.native.init import Init

if TYPE_CHECKING:
    from burnish.sandbox.native.station import Station


class Making:
    """A box on its way, or one that waits to be used."""

    def __init__(self, station: "Station", group: BoxGroup | None, after: int) -> None:
        """Made by `Station.make`."""
        self._after = after
        self._station = station
        self._lock = threading.Lock()
        self._outcome: Init | Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._abandoned = False
        self._begun_s = time.perf_counter()
        self.group = group
        self.took_s = 0.0

    @property
    def failed(self) -> bool:
        """Whether it is known that there will be no box."""
        return isinstance(self._outcome, Exception)

    @property
    def number(self) -> int:
        """Of the box; 0 until it is there."""
        return self._outcome.number if isinstance(self._outcome, Init) else 0

    @property
    def is_there(self) -> bool:
        """Whether commands would start at once."""
        return isinstance(self._outcome, Init) and self._outcome.is_there()

    def settle(self, outcome: Init | Exception) -> None:
        """The helper has answered."""
        self.took_s = time.perf_counter() - self._begun_s
        with self._lock:
            self._outcome = outcome
            waiter, abandoned = self._waiter, self._abandoned
        if abandoned:
            self._dispose()
        elif waiter is not None:
            resolve(waiter, None)

    async def wait(self) -> Init:
        """The live init. When cancelled, call `abandon`.

        Raises:
            OSError: the host is out of something.
            ClassifiedFailure: the helper has ended.
        """
        if self._outcome is None:
            with self._lock:
                waiter = self._waiter = asyncio.get_running_loop().create_future()
            with self._station.helper.watching():
                if self._outcome is None:
                    await waiter
        outcome = self._outcome
        if isinstance(outcome, Init):
            await self._station.gone(self._after)
            if not self._station.proven:
                await self._prove(outcome)
            return outcome
        assert outcome is not None
        raise outcome

    async def _prove(self, init: Init) -> None:
        """Where boxes have started, commands need not wait for the init to be there."""
        try:
            await init.ready()
        except (OSError, ClassifiedFailure) as error:
            self._outcome = error
            with contextlib.suppress(ClassifiedFailure):
                await self._station.ended(init)
            raise

    def abandon(self) -> None:
        """Nobody wants it: it ends, now or when it comes to life."""
        with self._lock:
            self._abandoned = True
            there = self._outcome is not None
        if there:
            self._dispose()

    def _dispose(self) -> None:
        group, self.group = self.group, None
        outcome, station = self._outcome, self._station
        if isinstance(outcome, Init):
            station.end(outcome, lambda: station.give_group(group))
        else:
            station.give_group(group)
