"""A picture as the bytes of a PNG file, by Pillow."""

from __future__ import annotations

import io
import itertools
import math
from collections.abc import Iterator, Sequence
from functools import cache

from PIL import Image, ImageDraw, ImageFont

from burnish.plan.canvas import Anchor, Point

# Pixels per unit of the page: sharp on most screens. Pillow's lines have hard edges, so they are
# drawn larger and made smaller.
_SCALE, _FINER = 2, 3
_ZOOM = _SCALE * _FINER
_INK = "#1f2328"
_SIZE, _TITLE_SIZE = 12, 15
_SIDES = {Anchor.START: "ls", Anchor.MIDDLE: "ms", Anchor.END: "rs"}


class PngCanvas:
    """See `Canvas`."""

    def __init__(self, width: float, height: float) -> None:
        """An empty page."""
        self._size = (math.ceil(width * _SCALE), math.ceil(height * _SCALE))
        large = (self._size[0] * _FINER, self._size[1] * _FINER)
        self._image = Image.new("RGB", large, "#ffffff")
        self._draw = ImageDraw.Draw(self._image)

    def line(
        self, points: Sequence[Point], colour: str, width: float, dash: Sequence[float] = ()
    ) -> None:
        """See `Canvas.line`."""
        for piece in _dashed(points, dash) if dash else [points]:
            pixels = [(x * _ZOOM, y * _ZOOM) for x, y in piece]
            self._draw.line(pixels, fill=colour, width=round(width * _ZOOM), joint="curve")

    def text(
        self, at: Point, text: str, *, anchor: Anchor = Anchor.START, title: bool = False
    ) -> None:
        """See `Canvas.text`."""
        where = (at[0] * _ZOOM, at[1] * _ZOOM)
        # The font has one weight: a stroke around the letters makes them heavier.
        heavier = _FINER // 2 if title else 0
        font = _font(_TITLE_SIZE if title else _SIZE)
        self._draw.text(
            where, text, fill=_INK, font=font, anchor=_SIDES[anchor], stroke_width=heavier
        )

    def png(self) -> bytes:
        """The whole file."""
        target = io.BytesIO()
        self._image.resize(self._size, Image.Resampling.BOX).save(target, "PNG", optimize=True)
        return target.getvalue()


@cache
def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    """What Pillow brings along, so that a picture is the same everywhere."""
    return ImageFont.load_default(size * _ZOOM)


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
