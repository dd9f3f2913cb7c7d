"""Charts as inline SVG: no script, no image files, readable in light, dark and print.

Colours come from the page's style sheet through classes. Every value is also text somewhere: in a
table, in a label, or in a `<title>` that shows on hover.
"""

from collections.abc import Sequence
from math import isfinite

from markupsafe import Markup, escape

from burnish.observe.data import Curve, DomainResult, LedgerView, Panel, Shares

_WIDTH, _HEIGHT = 320.0, 128.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 34.0, 6.0, 8.0, 18.0
# More colours than this cannot be told apart; what follows is summed up as "others".
MAX_BANDS = 8


def interval_bar(
    low: float, mid: float, high: float, *, span: tuple[float, float], label: str
) -> Markup:
    """A confidence interval on an axis that all rows share, with zero marked."""
    width, height = 150.0, 18.0
    start, stop = span
    scale = width / (stop - start or 1.0)

    def at(value: float) -> str:
        return f"{(value - start) * scale:.1f}"

    tone = "up" if low > 0 else "down" if high < 0 else "flat"
    bar_width = max((high - low) * scale, 1.0)
    return Markup(
        f'<svg class="interval {tone}" viewBox="0 0 {width:g} {height:g}" role="img" '
        f'aria-label="{escape(label)}"><title>{escape(label)}</title>'
        f'<line class="zero" x1="{at(0)}" x2="{at(0)}" y1="0" y2="{height:g}"/>'
        f'<rect class="range" x="{at(low)}" y="6" width="{bar_width:.1f}" height="6" rx="3"/>'
        f'<circle class="point" cx="{at(mid)}" cy="9" r="4"/></svg>'
    )


def interval_span(domains: Sequence[DomainResult]) -> tuple[float, float]:
    """An axis that holds every interval and zero, with a little air."""
    lows = [0.0, *(d.ci_low for d in domains), *(d.rl_ci_low or 0.0 for d in domains)]
    highs = [0.0, *(d.ci_high for d in domains), *(d.rl_ci_high or 0.0 for d in domains)]
    low, high = min(lows), max(highs)
    air = max(high - low, 0.02) * 0.06
    return low - air, high + air


def travel_bar(domain: DomainResult) -> Markup:
    """Pass rate from before (ring) over warmed (tick) to after (disc) on 0 to 100 %."""
    width = 130.0

    def at(rate: float) -> str:
        return f"{5 + rate * (width - 10):.1f}"

    label = f"from {percent(domain.before)} to {percent(domain.after)}"
    tick = ""
    if domain.warmed is not None:
        x = at(domain.warmed)
        tick = f'<line class="warmed" x1="{x}" x2="{x}" y1="4" y2="14"/>'
    return Markup(
        f'<svg class="travel {domain.direction}" viewBox="0 0 {width:g} 18" role="img" '
        f'aria-label="{label}"><title>{label}</title>'
        f'<line class="axis" x1="5" x2="{width - 5:g}" y1="9" y2="9"/>'
        f'<line class="path" x1="{at(domain.before)}" x2="{at(domain.after)}" y1="9" y2="9"/>'
        f'{tick}<circle class="from" cx="{at(domain.before)}" cy="9" r="3.6"/>'
        f'<circle class="point" cx="{at(domain.after)}" cy="9" r="4.4"/></svg>'
    )


def curve_chart(curve: Curve, num_steps: int) -> Markup:
    """Pass rate (strong) and mean reward (thin) of one domain; hover names each step.

    All curves of a run share the axis from step 1 to `num_steps`, so that they compare.
    """
    frame = _Frame(curve.steps, 0.0, 1.0, reach=(1, num_steps))
    titles = [
        f"step {s}: pass rate {p:.0%}, reward {r:.2f}"
        for s, p, r in zip(curve.steps, curve.pass_rate, curve.reward, strict=True)
    ]
    body = (
        frame.grid(("0", "50 %", "100 %"))
        + frame.line(smooth(curve.reward), "reward")
        + frame.dots(curve.pass_rate, "raw")
        + frame.line(smooth(curve.pass_rate), "pass")
        + frame.hover(titles)
    )
    last = f"; last step {curve.pass_rate[-1]:.0%}" if curve.pass_rate else ""
    return frame.svg(body, f"Pass rate and reward of {curve.domain} by step{last}")


def panel_chart(panel: Panel) -> Markup:
    """One metric by step on its own scale; values that are not finite leave a gap."""
    known = [p for p in zip(panel.steps, panel.values, strict=True) if isfinite(p[1])]
    steps, values = [s for s, _ in known], [v for _, v in known]
    high, low = max(values, default=0.0), min(0.0, min(values, default=0.0))
    frame = _Frame(steps, low, high if high > low else low + 1.0)
    middle = (frame.low + frame.high) / 2
    labels = (short(frame.low), short(middle), short(frame.high))
    titles = [f"step {s}: {short(v)} {panel.unit}".rstrip() for s, v in known]
    body = (
        frame.grid(labels)
        + frame.dots(values, "raw")
        + frame.line(smooth(values), "pass")
        + frame.hover(titles)
    )
    return frame.svg(body, f"{panel.title} by step")


def shares_chart(shares: Shares) -> Markup:
    """Bands stacked to 100 %, the largest domains first, the rest as one band."""
    frame = _Frame(shares.steps, 0.0, 1.0, width=680.0, height=170.0)
    floor = [0.0] * len(shares.steps)
    bands = []
    for position, (name, values) in enumerate(share_bands(shares)):
        ceiling = [a + b for a, b in zip(floor, values, strict=True)]
        top = [frame.point(i, v) for i, v in enumerate(ceiling)]
        bottom = [frame.point(i, v) for i, v in enumerate(floor)]
        mean = sum(values) / (len(values) or 1)
        bands.append(
            f'<polygon class="band band-{position}" points="{" ".join(top + bottom[::-1])}">'
            f"<title>{escape(name)}: {mean:.0%} on average</title></polygon>"
        )
        floor = ceiling
    return frame.svg("".join(bands) + frame.grid(("0", "50 %", "100 %")), "Share of work by domain")


def share_bands(shares: Shares) -> list[tuple[str, tuple[float, ...]]]:
    """The bands of `shares_chart`, in its order: also its legend."""
    ranked = sorted(shares.by_domain.items(), key=lambda item: -sum(item[1]))
    if len(ranked) <= MAX_BANDS:
        return ranked
    kept, rest = ranked[: MAX_BANDS - 1], ranked[MAX_BANDS - 1 :]
    others = tuple(sum(column) for column in zip(*(v for _, v in rest), strict=True))
    return [*kept, (f"{len(rest)} others", others)]


def ledger_bar(ledger: LedgerView) -> Markup:
    """Where the rollouts went, as one bar."""
    parts = [("trained", ledger.trained, "trained")]
    parts += [(f"dropped: {reason}", count, "lost") for reason, count in ledger.dropped.items()]
    parts += [("in flight", ledger.in_flight, "open")]
    total = sum(count for _, count, _ in parts) or 1
    x, rects = 0.0, []
    for label, count, tone in parts:
        width = 680.0 * count / total
        if count:
            rects.append(
                f'<rect class="{tone}" x="{x:.1f}" y="0" width="{max(width - 1.5, 0.5):.1f}" '
                f'height="14" rx="2"><title>{escape(label)}: {count}</title></rect>'
            )
        x += width
    return Markup(
        '<svg class="ledger" viewBox="0 0 680 14" preserveAspectRatio="none" role="img" '
        f'aria-label="Trained and dropped rollouts">{"".join(rects)}</svg>'
    )


def smooth(values: Sequence[float]) -> list[float]:
    """Centred moving average over about a tenth of the points: noise hides slow curves."""
    reach = len(values) // 20
    windows = (values[max(0, i - reach) : i + reach + 1] for i in range(len(values)))
    return [sum(window) / len(window) for window in windows]


def percent(ratio: float) -> str:
    """`41.0 %`."""
    return f"{ratio * 100:.1f} %"


def short(value: float) -> str:
    """A number in few characters: 1234567 is `1.23M`."""
    for limit, suffix in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            return f"{value / (1e3 if suffix == 'k' else limit):.3g}{suffix}"
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"


class _Frame:
    """The coordinate system of one chart."""

    def __init__(
        self,
        steps: Sequence[int],
        low: float,
        high: float,
        *,
        width: float = _WIDTH,
        height: float = _HEIGHT,
        reach: tuple[int, int] | None = None,
    ) -> None:
        self.steps, self.low, self.high = steps, low, high
        self.width, self.height = width, height
        first, last = (steps[0], steps[-1]) if steps else (0, 0)
        if reach is not None:
            first, last = min(first, reach[0]) if steps else reach[0], max(last, reach[1])
        self._first, self._last = first, last

    def x(self, i: int) -> float:
        room = self.width - _LEFT - _RIGHT
        return _LEFT + room * (self.steps[i] - self._first) / ((self._last - self._first) or 1)

    def y(self, value: float) -> float:
        room = self.height - _TOP - _BOTTOM
        bounded = min(max(value, self.low), self.high)
        return _TOP + room * (1 - (bounded - self.low) / (self.high - self.low))

    def point(self, i: int, value: float) -> str:
        return f"{self.x(i):.1f},{self.y(value):.1f}"

    def line(self, values: Sequence[float], name: str) -> str:
        points = " ".join(self.point(i, v) for i, v in enumerate(values))
        return f'<polyline class="{name}" points="{points}"/>'

    def dots(self, values: Sequence[float], name: str) -> str:
        circles = (
            f'<circle cx="{self.x(i):.1f}" cy="{self.y(v):.1f}" r="1.4"/>'
            for i, v in enumerate(values)
        )
        return f'<g class="{name}">{"".join(circles)}</g>'

    def grid(self, labels: tuple[str, str, str]) -> str:
        parts = []
        for label, value in zip(
            labels, (self.low, (self.low + self.high) / 2, self.high), strict=True
        ):
            y = self.y(value)
            parts.append(
                f'<line class="grid" x1="{_LEFT}" x2="{self.width - _RIGHT}" '
                f'y1="{y:.1f}" y2="{y:.1f}"/>'
                f'<text x="{_LEFT - 5}" y="{y + 3:.1f}" text-anchor="end">{escape(label)}</text>'
            )
        y = self.height - 5
        parts.append(f'<text x="{_LEFT}" y="{y}">step {self._first}</text>')
        parts.append(
            f'<text x="{self.width - _RIGHT}" y="{y}" text-anchor="end">{self._last}</text>'
        )
        return "".join(parts)

    def hover(self, titles: Sequence[str]) -> str:
        """A strip per step that lights up and names its values; needs no script."""
        column = (self.width - _LEFT - _RIGHT) / max(self._last - self._first, 1)
        strips = (
            f'<rect x="{self.x(i) - column / 2:.1f}" y="{_TOP}" width="{column:.1f}" '
            f'height="{self.height - _TOP - _BOTTOM:.1f}"><title>{escape(title)}</title></rect>'
            for i, title in enumerate(titles)
        )
        return f'<g class="hover">{"".join(strips)}</g>'

    def svg(self, body: str, label: str) -> Markup:
        name = "chart broad" if self.width > _WIDTH else "chart"
        return Markup(
            f'<svg class="{name}" viewBox="0 0 {self.width:g} {self.height:g}" role="img" '
            f'aria-label="{escape(label)}">{body}</svg>'
        )
