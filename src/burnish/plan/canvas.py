"""What pictures are drawn on: lines and words, whatever file they become."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Protocol

Point = tuple[float, float]
"""Across and down, in units of the page."""


class Anchor(StrEnum):
    """Where a text stands beside its point."""

    START = "start"
    """To the right of it."""
    MIDDLE = "middle"
    """Around it."""
    END = "end"
    """To the left of it."""


class Canvas(Protocol):
    """A white page."""

    def line(
        self, points: Sequence[Point], colour: str, width: float, dash: Sequence[float] = ()
    ) -> None:
        """Draw from point to point.

        Args:
            points: in order.
            colour: as "#1f6feb".
            width: of the stroke.
            dash: lengths that are drawn and left out in turn; empty: all is drawn.
        """
        ...

    def text(
        self, at: Point, text: str, *, anchor: Anchor = Anchor.START, title: bool = False
    ) -> None:
        """Write one line.

        Args:
            at: on the line that letters stand on.
            text: the words.
            anchor: which end of it is there.
            title: larger, and heavier.
        """
        ...
