"""Renders `ReportData` as one self-contained HTML page.

What models wrote is hostile text: autoescape is on, the page has no script, and its content
security policy forbids any. Only `charts` makes markup, and it escapes what it is given.
"""

from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from burnish.core.vocabulary import DropReason
from burnish.observe import charts
from burnish.observe.data import Interval, ReportData
from burnish.observe.duration import duration

_REASONS = {
    DropReason.ZERO_VARIANCE: "All samples of the task scored the same: nothing to learn from.",
    DropReason.STALE: "Older than the allowed lag when its turn came.",
    DropReason.INVALID: "A failure left it without a score.",
    DropReason.QUARANTINED: "Its environment was quarantined after dispatch.",
    DropReason.SURPLUS: "Still open when the run reached its last step.",
}


def render(data: ReportData) -> str:
    """The whole page."""
    env = Environment(
        loader=PackageLoader("burnish.observe", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=False,
    )
    loader_source = env.loader
    assert loader_source is not None
    css = loader_source.get_source(env, "report.css")[0]
    return env.get_template("report.html.j2").render(
        data=data,
        css=Markup(css),
        charts=charts,
        span=charts.interval_span(data.domains),
        warmed=any(row.warmed is not None for row in data.domains)
        or any(row.warmed is not None for row in data.lost),
        reasons=_REASONS,
        headline=headline(data),
        subline=_subline(data),
        alerts=_alerts(data),
        numbers=_numbers(data),
        sections=_sections(data),
    )


def headline(data: ReportData) -> str:
    """The result in one sentence."""
    if not data.domains:
        return f"{data.title}: no held-out result yet"
    num = len(data.domains)
    before = charts.percent(sum(row.before for row in data.domains) / num)
    after = charts.percent(sum(row.after for row in data.domains) / num)
    warmed = [row.warmed for row in data.domains if row.warmed is not None]
    change = f"from {before} to {after}"
    if len(warmed) == num:
        middle = charts.percent(sum(warmed) / num)
        change = f"from {before} to {middle} by the warm-up, to {after} by reinforcement learning"
    domains = "1 domain" if num == 1 else f"{num} domains"
    return f"Held-out pass rate over {domains}: {change}"


def _subline(data: ReportData) -> str:
    wall = f" in {duration(data.wall_s)}" if data.wall_s is not None else ""
    return (
        f"{data.model}, {data.num_steps} steps of reinforcement learning{wall}. Run {data.title}."
    )


def _alerts(data: ReportData) -> list[str]:
    alerts = []
    if data.status != "complete":
        alerts.append(data.status)
    worse = [row.name for row in data.domains if row.direction == "down"]
    if worse:
        alerts.append(f"Significantly worse than before: {', '.join(worse)}.")
    unlearned = [r.name for r in data.domains if r.warmed is not None and (r.rl_ci_high or 0.0) < 0]
    if unlearned:
        alerts.append(f"Reinforcement learning made these worse: {', '.join(unlearned)}.")
    if data.num_steps and not data.ledger.trained and data.ledger.dispatched:
        alerts.append("No step had a gradient: reinforcement learning left the model unchanged.")
    alerts += [f"{name} is quarantined: {why}" for name, why in data.quarantined.items()]
    alerts += data.problems
    if data.ledger.missing:
        alerts.append(f"{data.ledger.missing} rollouts are not accounted for: a bug in burnish.")
    return alerts


def _numbers(data: ReportData) -> list[tuple[str, str, str]]:
    """The figures under the headline: name, value, unit."""
    numbers: list[tuple[str, str, str]] = []
    if data.domains:
        up = sum(row.direction == "up" for row in data.domains)
        numbers += _gain_number("Mean gain", data.mean_gain)
        if any(row.warmed is not None for row in data.domains):
            numbers += _gain_number("of which RL", data.mean_rl_gain)
        numbers.append(("Domains clearly up", str(up), f"of {len(data.domains)}"))
    if data.steps_with_gradient is not None:
        steps = (str(data.steps_with_gradient), f"of {data.num_steps}")
        numbers.append(("Steps with a gradient", *steps))
    if data.wall_s is not None:
        numbers.append(("Wall time", duration(data.wall_s), ""))
    if data.peak_rss_bytes is not None:
        numbers.append(("Peak memory", f"{data.peak_rss_bytes / 1e9:.1f}", "GB"))
    if data.ledger.dispatched:
        numbers.append(
            ("Rollouts trained", f"{data.ledger.trained}", f"of {data.ledger.dispatched}")
        )
    return numbers


def _gain_number(name: str, gain: Interval | None) -> list[tuple[str, str, str]]:
    if gain is None:
        return []
    unit = "points"
    if gain.low is not None and gain.high is not None:
        unit = f"[{gain.low * 100:+.1f}, {gain.high * 100:+.1f}] points"
    return [(name, f"{gain.diff * 100:+.1f}", unit)]


def _sections(data: ReportData) -> list[tuple[str, str]]:
    """Anchors of the sections that are on the page."""
    candidates: list[tuple[str, str, Any]] = [
        ("results", "Results", data.domains or data.lost),
        ("curves", "Learning curves", data.curves),
        ("samples", "Before and after", data.samples),
        ("tokens", "Tokens", data.token_views),
        ("ledger", "Ledger", data.ledger.dispatched),
        ("lengths", "Lengths", data.lengths),
        ("shares", "Scheduler", data.shares and data.shares.steps),
        ("speed", "Speed", data.panels),
        ("failures", "Failures", True),
        ("trust", "Trust", data.gates or data.canary),
        ("facts", "The run", True),
    ]
    return [(anchor, name) for anchor, name, there in candidates if there]
