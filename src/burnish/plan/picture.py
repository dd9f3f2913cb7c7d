"""Curves of a comparison as an SVG or PNG file, or inside a page with the figures as tables."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from markupsafe import escape

from burnish.core.disk import require_writable, write_atomically
from burnish.core.errors import UserError, one_line
from burnish.plan.canvas import Anchor, Canvas
from burnish.plan.comparison import Comparison, Result, mean_curve
from burnish.plan.png_canvas import PngCanvas
from burnish.plan.svg_canvas import SvgCanvas

_WIDTH, _PANEL = 860.0, 320.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 60.0, 640.0, 40.0, 270.0
_COLOURS = ("#1f6feb", "#c2410c", "#15803d", "#7c3aed", "#0e7490", "#a16207", "#be185d", "#374151")
_DASHES = ((), (6.0, 3.0), (2.0, 3.0))
_GRID = "#d0d7de"
_NUM_GRID_LINES = 5
ENDINGS = (".png", ".svg", ".html")
_PAGE = (
    '<!doctype html><html lang="en"><meta charset="utf-8"><title>burnish simulate</title><style>'
    "body{font:14px system-ui,sans-serif;margin:24px;color:#1f2328}table{border-collapse:collapse}"
    "td,th{padding:3px 10px;text-align:right;border-bottom:1px solid #d0d7de}"
    "td:first-child,th:first-child{text-align:left}</style>"
)


def check_target(path: Path) -> None:
    """Refuse a file that `draw` could not write, before the work is done.

    Raises:
        UserError: its ending is of no kind that is drawn, or it cannot be written.
    """
    if path.suffix.lower() not in ENDINGS:
        raise UserError(
            f"--plot {path}: pictures are PNG, SVG or HTML, and the name ends in none of them.",
            fix=f"--plot {path.with_suffix('.png') if path.name else 'curves.png'}",
        )
    require_writable(path, "--plot")


def draw(comparisons: Sequence[Comparison], path: Path) -> None:
    """Write the picture, of the kind that the name's ending says.

    Raises:
        UserError: if the file cannot be written.
    """
    check_target(path)
    ending = path.suffix.lower()
    if ending == ".png":
        data = png(comparisons)
    elif ending == ".svg":
        data = svg(comparisons).encode()
    else:
        tables = "".join(_table(c) for c in comparisons)
        title = "<h1>Scheduling policies, simulated</h1>"
        data = f"{_PAGE}{title}{svg(comparisons)}{tables}</html>\n".encode()
    try:
        write_atomically(path, data)
    except OSError as error:
        raise UserError(
            f"--plot {path} cannot be written: {one_line(error)}.", fix="give another path."
        ) from error


def svg(comparisons: Sequence[Comparison]) -> str:
    """One panel per scenario."""
    canvas = SvgCanvas(_WIDTH, _PANEL * len(comparisons))
    _panels(comparisons, canvas)
    return canvas.svg()


def png(comparisons: Sequence[Comparison]) -> bytes:
    """The same."""
    canvas = PngCanvas(_WIDTH, _PANEL * len(comparisons))
    _panels(comparisons, canvas)
    return canvas.png()


def _panels(comparisons: Sequence[Comparison], canvas: Canvas) -> None:
    for number, comparison in enumerate(comparisons):
        _panel(comparison, number * _PANEL, canvas)


def _panel(comparison: Comparison, top: float, canvas: Canvas) -> None:
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
    canvas.text((_LEFT, top + 24), f"{comparison.scenario}: {about.name}", title=True)
    for i in range(_NUM_GRID_LINES):
        y = low + (high - low) * i / (_NUM_GRID_LINES - 1)
        canvas.line([(_LEFT, down(y)), (_RIGHT, down(y))], _GRID, 1.0)
        canvas.text((_LEFT - 8, down(y) + 4), f"{y:.3g}", anchor=Anchor.END)
    for x in (first, last):
        canvas.text((across(x), top + _BOTTOM + 18), f"{x:g}", anchor=Anchor.MIDDLE)
    middle = ((_LEFT + _RIGHT) / 2, top + _BOTTOM + 34)
    canvas.text(middle, about.x_label, anchor=Anchor.MIDDLE)
    for number, (result, curve) in enumerate(curves):
        colour = _COLOURS[number % len(_COLOURS)]
        dash = _DASHES[number // len(_COLOURS) % len(_DASHES)]
        canvas.line([(across(x), down(y)) for x, y in curve.points], colour, 1.8, dash)
        key = top + _TOP + 16 * number
        canvas.line([(_RIGHT + 14, key), (_RIGHT + 40, key)], colour, 2.5, dash)
        canvas.text((_RIGHT + 46, key + 4), _label(result))


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
