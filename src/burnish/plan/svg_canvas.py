"""A picture as the text of an SVG file."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import escape

from burnish.plan.canvas import Anchor, Point

_STYLE = "text{font:12px system-ui,sans-serif;fill:#1f2328}.title{font-weight:600;font-size:15px}"


class SvgCanvas:
    """See `Canvas`."""

    def __init__(self, width: float, height: float) -> None:
        """An empty page."""
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}" '
            f'viewBox="0 0 {width:g} {height:g}"><style>{_STYLE}</style>'
            '<rect width="100%" height="100%" fill="#ffffff"/>'
        ]

    def line(
        self, points: Sequence[Point], colour: str, width: float, dash: Sequence[float] = ()
    ) -> None:
        """See `Canvas.line`."""
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        dashes = f' stroke-dasharray="{" ".join(f"{d:g}" for d in dash)}"' if dash else ""
        self._parts.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" '
            f'stroke-width="{width:g}"{dashes}/>'
        )

    def text(
        self, at: Point, text: str, *, anchor: Anchor = Anchor.START, title: bool = False
    ) -> None:
        """See `Canvas.text`."""
        kind = ' class="title"' if title else ""
        side = "" if anchor is Anchor.START else f' text-anchor="{anchor}"'
        self._parts.append(
            f'<text{kind} x="{at[0]:.1f}" y="{at[1]:.1f}"{side}>{escape(text)}</text>'
        )

    def svg(self) -> str:
        """The whole file."""
        return "".join((*self._parts, "</svg>\n"))
