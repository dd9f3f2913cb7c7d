"""A picture of an engine's speed: one SVG file that any browser and most editors show.

No colours by name only: every line is labelled at its end, every point has its value beside it.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from markupsafe import escape

_WIDTH, _PANEL, _GAP = 860.0, 300.0, 46.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 64.0, 120.0, 46.0, 44.0
_COLOURS = ("#1f6feb", "#c2410c", "#15803d")
_STYLE = (
    "text{font:13px system-ui,sans-serif;fill:#1f2328}.title{font-weight:600;font-size:15px}"
    ".small{font-size:11px;fill:#57606a}.axis{stroke:#8c959f}.grid{stroke:#d0d7de}"
)


class Line(NamedTuple):
    """Points of one quantity."""

    name: str
    """At the end of the line."""
    points: tuple[tuple[float, float], ...]
    """(x, y), both above 0."""


class Panel(NamedTuple):
    """One picture with logarithmic axes."""

    title: str
    """Above it."""
    x_label: str
    """Below it."""
    unit: str
    """Of all its lines."""
    lines: tuple[Line, ...]
    """What it shows."""


def chart(heading: str, panels: Sequence[Panel]) -> str:
    """The whole file. Panels without a point are left out."""
    shown = [panel for panel in panels if any(line.points for line in panel.lines)]
    height = 40 + len(shown) * (_PANEL + _GAP)
    body = "".join(
        _panel(panel, 40 + number * (_PANEL + _GAP)) for number, panel in enumerate(shown)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH:g}" height="{height:g}" '
        f'viewBox="0 0 {_WIDTH:g} {height:g}"><style>{_STYLE}</style>'
        f'<rect width="100%" height="100%" fill="#ffffff"/>'
        f'<text class="title" x="16" y="26">{escape(heading)}</text>{body}</svg>\n'
    )


def _panel(panel: Panel, top: float) -> str:
    points = [point for line in panel.lines for point in line.points if point[1] > 0]
    if not points:
        return ""
    x_ticks = sorted({x for x, _ in points})
    y_ticks = _ticks(min(y for _, y in points), max(y for _, y in points))
    low, high = y_ticks[0], y_ticks[-1]
    left, right = _LEFT, _WIDTH - _RIGHT
    upper, lower = top + _TOP, top + _PANEL - _BOTTOM

    def across(x: float) -> float:
        if x_ticks[-1] == x_ticks[0]:
            return (left + right) / 2
        share = math.log(x / x_ticks[0]) / math.log(x_ticks[-1] / x_ticks[0])
        return left + 40 + share * (right - left - 80)

    def down(y: float) -> float:
        return lower - math.log(y / low) / math.log(high / low) * (lower - upper)

    parts = [
        f'<text class="title" x="{left:g}" y="{top + 22:g}">{escape(panel.title)}</text>'
        f'<text class="small" x="{right:g}" y="{top + 22:g}" text-anchor="end">'
        f"{escape(panel.unit)}, logarithmic axes</text>"
    ]
    for y in y_ticks:
        parts.append(
            f'<line class="grid" x1="{left:g}" x2="{right:g}" y1="{down(y):.1f}" '
            f'y2="{down(y):.1f}"/><text class="small" x="{left - 6:g}" y="{down(y) + 4:.1f}" '
            f'text-anchor="end">{_number(y)}</text>'
        )
    for x in x_ticks:
        parts.append(
            f'<text class="small" x="{across(x):.1f}" y="{lower + 17:g}" '
            f'text-anchor="middle">{_number(x)}</text>'
        )
    parts.append(
        f'<line class="axis" x1="{left:g}" x2="{right:g}" y1="{lower:g}" y2="{lower:g}"/>'
        f'<text class="small" x="{(left + right) / 2:g}" y="{lower + 34:g}" '
        f'text-anchor="middle">{escape(panel.x_label)}</text>'
    )
    for number, line in enumerate(panel.lines):
        drawn = [(across(x), down(y), y) for x, y in line.points if y > 0]
        parts.append(_line(line.name, drawn, panel.unit, _COLOURS[number % len(_COLOURS)]))
    return "".join(parts)


def _line(name: str, drawn: Sequence[tuple[float, float, float]], unit: str, colour: str) -> str:
    if not drawn:
        return ""
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y, _ in drawn)
    parts = [f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>']
    for x, y, value in drawn:
        parts.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}"/>'
            f'<text class="small" x="{x:.1f}" y="{y - 8:.1f}" text-anchor="middle">'
            f"{_number(value)} {escape(unit)}</text>"
        )
    x, y, _ = drawn[-1]
    parts.append(
        f'<text x="{x + 34:.1f}" y="{y + 4:.1f}" style="fill:{colour}">{escape(name)}</text>'
    )
    return "".join(parts)


def _ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten around all values, at least two."""
    steps = [m * 10.0**e for e in range(-7, 10) for m in (1, 2, 5)]
    first = max((i for i, s in enumerate(steps) if s <= low * 0.999), default=0)
    last = min((i for i, s in enumerate(steps) if s >= high * 1.15), default=len(steps) - 1)
    last = max(last, first + 1)
    stride = max(1, (last - first) // 6)
    chosen = steps[first : last + 1 : stride]
    return chosen if chosen[-1] >= high else [*chosen, steps[last]]


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
