"""Renders `ReportData` as one self-contained HTML page.

What models wrote is hostile text: autoescape is on, the page has no script, and its content
security policy forbids any. Only `charts` makes markup, and it escapes what it is given.
"""

from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from burnish.core.vocabulary import DropReason
from burnish.observe import charts
from burnish.observe.data import ReportData
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
        warmed=any(row.warmed is not None for row in data.domains),
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
    before = sum(row.before for row in data.domains) / len(data.domains)
    after = sum(row.after for row in data.domains) / len(data.domains)
    domains = "1 domain" if len(data.domains) == 1 else f"{len(data.domains)} domains"
    change = f"from {charts.percent(before)} to {charts.percent(after)}"
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
    quarantined = [gate.name for gate in data.gates if not gate.passed]
    if quarantined:
        alerts.append(f"Quarantined before training: {', '.join(quarantined)}.")
    if data.ledger.missing:
        alerts.append(f"{data.ledger.missing} rollouts are not accounted for: a bug in burnish.")
    return alerts


def _numbers(data: ReportData) -> list[tuple[str, str, str]]:
    """The figures under the headline: name, value, unit."""
    numbers: list[tuple[str, str, str]] = []
    if data.domains:
        mean = sum(row.diff for row in data.domains) / len(data.domains)
        up = sum(row.direction == "up" for row in data.domains)
        unit = "points"
        if data.mean_interval is not None:
            low, high = data.mean_interval
            unit = f"[{low * 100:+.1f}, {high * 100:+.1f}] points"
        numbers.append(("Mean gain", f"{mean * 100:+.1f}", unit))
        numbers.append(("Domains clearly up", str(up), f"of {len(data.domains)}"))
    if data.wall_s is not None:
        numbers.append(("Wall time", duration(data.wall_s), ""))
    if data.peak_rss_bytes is not None:
        numbers.append(("Peak memory", f"{data.peak_rss_bytes / 1e9:.1f}", "GB"))
    if data.ledger.dispatched:
        numbers.append(
            ("Rollouts trained", f"{data.ledger.trained}", f"of {data.ledger.dispatched}")
        )
    return numbers


def _sections(data: ReportData) -> list[tuple[str, str]]:
    """Anchors of the sections that are on the page."""
    candidates: list[tuple[str, str, Any]] = [
        ("results", "Results", data.domains),
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
