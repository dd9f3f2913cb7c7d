"""A picture as the bytes of a PNG file, drawn here: nothing that draws is among our dependencies.

Everything is a stroke, letters too. A pixel is covered by as much as its centre lies within the
stroke's width, which smooths edges; lines that meet cover it once.
"""

from __future__ import annotations

import itertools
import math
import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from burnish.plan.canvas import Anchor, Point
from burnish.plan.letters import CAP_HEIGHT, strokes_of, width_of

# Pixels per unit of the page: sharp on most screens.
_SCALE = 2.0
_INK = "#1f2328"
_CAP, _TITLE_CAP = 8.5, 10.5
_STROKE, _TITLE_STROKE = 1.15, 1.7

Pixels = npt.NDArray[np.float32]


class PngCanvas:
    """See `Canvas`."""

    def __init__(self, width: float, height: float) -> None:
        """An empty page."""
        shape = (math.ceil(height * _SCALE), math.ceil(width * _SCALE), 3)
        self._pixels: Pixels = np.full(shape, 255.0, dtype=np.float32)

    def line(
        self, points: Sequence[Point], colour: str, width: float, dash: Sequence[float] = ()
    ) -> None:
        """See `Canvas.line`."""
        self._stroke(_dashed(points, dash) if dash else [points], colour, width)

    def text(
        self, at: Point, text: str, *, anchor: Anchor = Anchor.START, title: bool = False
    ) -> None:
        """See `Canvas.text`."""
        unit = (_TITLE_CAP if title else _CAP) / CAP_HEIGHT
        x, y = at
        length = unit * sum(map(width_of, text))
        left = {Anchor.START: x, Anchor.MIDDLE: x - length / 2, Anchor.END: x - length}[anchor]
        lines = []
        for letter in text:
            lines += [
                [(left + unit * a, y + unit * (b - CAP_HEIGHT)) for a, b in stroke]
                for stroke in strokes_of(letter)
            ]
            left += unit * width_of(letter)
        self._stroke(lines, _INK, _TITLE_STROKE if title else _STROKE)

    def png(self) -> bytes:
        """The whole file."""
        pixels = np.rint(self._pixels).astype(np.uint8)
        height, width, _ = pixels.shape
        # Each row begins with its filter: none.
        rows = np.concatenate([np.zeros((height, 1), np.uint8), pixels.reshape(height, -1)], axis=1)
        header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
        parts = ((b"IHDR", header), (b"IDAT", zlib.compress(rows.tobytes(), 9)), (b"IEND", b""))
        return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, data) for kind, data in parts)

    def _stroke(self, lines: Iterable[Sequence[Point]], colour: str, width: float) -> None:
        cover = np.zeros(self._pixels.shape[:2], dtype=np.float32)
        box: list[tuple[slice, slice]] = []
        for line in lines:
            for start, end in itertools.pairwise(line):
                box.append(_cover(cover, start, end, width * _SCALE / 2))
        if not box:
            return
        down = slice(min(d.start for d, _ in box), max(d.stop for d, _ in box))
        across = slice(min(a.start for _, a in box), max(a.stop for _, a in box))
        ink = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)], dtype=np.float32)
        share = cover[down, across, None]
        page = self._pixels[down, across]
        page += share * (ink - page)


def _cover(cover: Pixels, start: Point, end: Point, radius: float) -> tuple[slice, slice]:
    """Mark how much of each pixel one straight piece covers; returns where it lies."""
    (x0, y0), (x1, y1) = ((x * _SCALE, y * _SCALE) for x, y in (start, end))
    height, width = cover.shape
    reach = radius + 1.0
    down = _within(min(y0, y1) - reach, max(y0, y1) + reach, height)
    across = _within(min(x0, x1) - reach, max(x0, x1) + reach, width)
    y = np.arange(down.start, down.stop, dtype=np.float32)[:, None] + 0.5
    x = np.arange(across.start, across.stop, dtype=np.float32)[None, :] + 0.5
    dx, dy = x1 - x0, y1 - y0
    squared = dx * dx + dy * dy
    along = ((x - x0) * dx + (y - y0) * dy) / squared if squared else np.float32(0.0)
    along = np.clip(along, 0.0, 1.0)
    distance = np.hypot(x - x0 - along * dx, y - y0 - along * dy)
    part = cover[down, across]
    np.maximum(part, np.clip(radius + 0.5 - distance, 0.0, 1.0), out=part)
    return down, across


def _within(low: float, high: float, size: int) -> slice:
    first = min(max(math.floor(low), 0), size)
    return slice(first, min(max(math.ceil(high), first), size))


def _dashed(points: Sequence[Point], dash: Sequence[float]) -> Iterator[list[Point]]:
    """The pieces that are drawn, the pattern going on around corners."""
    pattern = itertools.cycle(dash)
    left, drawn = next(pattern), True
    piece = [points[0]]
    for (x0, y0), (x1, y1) in itertools.pairwise(points):
        length, done = math.hypot(x1 - x0, y1 - y0), 0.0
        while length - done > left:
            done += left
            corner = (x0 + (x1 - x0) * done / length, y0 + (y1 - y0) * done / length)
            if drawn:
                yield [*piece, corner]
            piece, drawn, left = [corner], not drawn, next(pattern)
        left -= length - done
        piece.append((x1, y1))
    if drawn:
        yield piece


def _chunk(kind: bytes, data: bytes) -> bytes:
    check = zlib.crc32(kind + data)
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", check)
