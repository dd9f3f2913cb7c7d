"""How work in a thread is told to end early."""

import threading
from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


class Stopped(Exception):
    """The work was told to end."""


class Stop:
    """One side sets it, the other looks at it wherever it could go on for long."""

    def __init__(self) -> None:
        """Start as: go on."""
        self._event = threading.Event()

    @property
    def is_set(self) -> bool:
        """Whether to end."""
        return self._event.is_set()

    def set(self) -> None:
        """End soon."""
        self._event.set()

    def check(self) -> None:
        """Where the work may end.

        Raises:
            Stopped: it shall.
        """
        if self._event.is_set():
            raise Stopped

    def among(self, parts: Iterable[T]) -> Iterator[T]:
        """The same parts, while the work may go on."""
        for part in parts:
            self.check()
            yield part
