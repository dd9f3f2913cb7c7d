"""Ctrl-C: the first one ends at the next safe point, the second one at once."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Interrupts:
    """What an interrupt does at the moment; phases change it as they come and go."""

    def __init__(self, main: asyncio.Task[object]) -> None:
        """An interrupt cancels `main` unless a phase knows something gentler."""
        self._main = main
        self._gentle: Callable[[], None] | None = None
        self._count = 0

    @property
    def happened(self) -> bool:
        """Whether somebody asked to stop."""
        return self._count > 0

    @contextmanager
    def gently(self, stop: Callable[[], None]) -> Iterator[None]:
        """While inside, the first interrupt calls `stop`; if one came already, it does now."""
        self._gentle = stop
        if self.happened:
            stop()
        try:
            yield
        finally:
            self._gentle = None

    def interrupt(self) -> None:
        """Somebody pressed Ctrl-C, or sent SIGTERM."""
        self._count += 1
        if self._gentle is not None and self._count == 1:
            self._gentle()
        else:
            self._main.cancel()

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Listen for SIGINT and SIGTERM on the running loop, where the platform allows it."""
        loop = asyncio.get_running_loop()
        signals = (signal.SIGINT, signal.SIGTERM)
        try:
            for number in signals:
                loop.add_signal_handler(number, self.interrupt)
        except (NotImplementedError, RuntimeError, ValueError):
            # Not the main thread: whoever owns it decides.
            yield
            return
        try:
            yield
        finally:
            for number in signals:
                loop.remove_signal_handler(number)
