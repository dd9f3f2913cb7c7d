"""Curves of a comparison as one SVG file, or the same inside a page with the figures as tables."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from markupsafe import escape

from burnish.core.errors import UserError, one_line
from burnish.plan.comparison import Comparison, Result, mean_curve

_WIDTH, _PANEL = 860.0, 320.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 60.0, 640.0, 40.0, 270.0
_COLOURS = ("#1f6feb", "#c2410c", "#15803d", "#7c3aed", "#0e7490", "#a16207", "#be185d", "#374151")
_DASHES = ("", "6 3", "2 3")
_STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#1f2328}.title{font-weight:600;font-size:15px}"
    ".axis{stroke:#8c959f}.grid{stroke:#d0d7de}"
)
_PAGE = (
    '<!doctype html><html lang="en"><meta charset="utf-8"><title>burnish simulate</title><style>'
    "body{font:14px system-ui,sans-serif;margin:24px;color:#1f2328}table{border-collapse:collapse}"
    "td,th{padding:3px 10px;text-align:right;border-bottom:1px solid #d0d7de}"
    "td:first-child,th:first-child{text-align:left}</style>"
)


def draw(comparisons: Sequence[Comparison], path: Path) -> None:
    """Write the picture; a name that ends in .html gives a page.

    Raises:
        UserError: if the file cannot be written.
    """
    text = svg(comparisons)
    if path.suffix == ".html":
        tables = "".join(_table(c) for c in comparisons)
        text = f"{_PAGE}<h1>Scheduling policies, simulated</h1>{text}{tables}</html>\n"
    try:
        path.write_text(text)
    except OSError as error:
        raise UserError(
            f"--plot {path} cannot be written: {one_line(error)}.", fix="give another path."
        ) from error


def svg(comparisons: Sequence[Comparison]) -> str:
    """One panel per scenario."""
    body = "".join(_panel(c, i * _PANEL) for i, c in enumerate(comparisons))
    height = _PANEL * len(comparisons)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH:g}" height="{height:g}" '
        f'viewBox="0 0 {_WIDTH:g} {height:g}"><style>{_STYLE}</style>'
        f'<rect width="100%" height="100%" fill="#ffffff"/>{body}</svg>\n'
    )


def _panel(comparison: Comparison, top: float) -> str:
    curves = [(r, mean_curve(r.trials)) for r in comparison.results]
    xs = [x for _, c in curves for x, _ in c.points]
    ys = [y for _, c in curves for _, y in c.points]
    low, high = min(ys), max(ys)
    high = high if high > low else low + 1.0
    first, last = min(xs), max(max(xs), min(xs) + 1e-9)

    def across(x: float) -> float:
        return _LEFT + (x - first) / (last - first) * (_RIGHT - _LEFT)

    def down(y: float) -> float:
        return top + _BOTTOM - (y - low) / (high - low) * (_BOTTOM - _TOP)

    about = curves[0][1]
    parts = [
        f'<text class="title" x="{_LEFT:g}" y="{top + 24:g}">{escape(comparison.scenario)}: '
        f"{escape(about.name)}</text>"
    ]
    for i in range(5):
        y = low + (high - low) * i / 4
        parts.append(
            f'<line class="grid" x1="{_LEFT:g}" x2="{_RIGHT:g}" y1="{down(y):.1f}" '
            f'y2="{down(y):.1f}"/><text x="{_LEFT - 8:g}" y="{down(y) + 4:.1f}" '
            f'text-anchor="end">{y:.3g}</text>'
        )
    for x in (first, last):
        parts.append(
            f'<text x="{across(x):.1f}" y="{top + _BOTTOM + 18:g}" '
            f'text-anchor="middle">{x:g}</text>'
        )
    parts.append(
        f'<text x="{(_LEFT + _RIGHT) / 2:g}" y="{top + _BOTTOM + 34:g}" '
        f'text-anchor="middle">{escape(about.x_label)}</text>'
    )
    for number, (result, curve) in enumerate(curves):
        colour = _COLOURS[number % len(_COLOURS)]
        dash = _DASHES[number // len(_COLOURS) % len(_DASHES)]
        line = " ".join(f"{across(x):.1f},{down(y):.1f}" for x, y in curve.points)
        key = top + _TOP + 16 * number
        parts.append(
            f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.8" '
            f'stroke-dasharray="{dash}"/><line x1="{_RIGHT + 14:g}" x2="{_RIGHT + 40:g}" '
            f'y1="{key:g}" y2="{key:g}" stroke="{colour}" stroke-width="2.5" '
            f'stroke-dasharray="{dash}"/><text x="{_RIGHT + 46:g}" y="{key + 4:g}">'
            f"{escape(_label(result))}</text>"
        )
    return "".join(parts)


def _label(result: Result) -> str:
    name, value = next(iter(result.metrics.items()))
    return f"{result.policy}  {name} {value.mean:.3f}"


def _table(comparison: Comparison) -> str:
    names = list(comparison.results[0].metrics)
    head = "".join(f"<th>{escape(n)}</th>" for n in ("policy", *names))
    rows = "".join(
        f"<tr><td>{escape(r.policy)}</td>"
        + "".join(f"<td>{i.text('&plusmn;')}</td>" for i in r.metrics.values())
        + "</tr>"
        for r in comparison.results
    )
    title = f"{comparison.scenario}, tier {comparison.tier.value}, {comparison.seeds_text}"
    return f"<h2>{escape(title)}</h2><table><tr>{head}</tr>{rows}</table>"
