"""The end of a run in the terminal: the table, the ledger, and where everything lies."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.text import Text

from burnish.cli.console import people, table
from burnish.observe.printable import printable


def show_result(result: Mapping[str, Any]) -> None:
    """Print the content of a `result.json` for people."""
    console = people()
    domains = result["domains"]
    if domains:
        console.print()
        console.print(_domain_table(domains))
    mean = result.get("mean")
    if mean is not None:
        gain = _gain(mean["diff"], mean["ci_low"], mean["ci_high"])
        console.print(Text.assemble("mean gain in points: ", gain))
    if _has_warmup(domains):
        console.print(Text.assemble("of which reinforcement learning: ", _mean_rl(result)))
    console.print()
    console.print(Text(ledger_line(result["ledger"])))
    if not result["ledger"]["trained"]:
        since = "since the warm-up" if _has_warmup(domains) else "by reinforcement learning"
        line = f"no step had a gradient: the model is unchanged {since}"
        console.print(Text(line, style="yellow"))
    for name, reason in result["quarantined"].items():
        console.print(Text(printable(f"quarantined  {name}: {reason}", keep=""), style="yellow"))
    console.print(Text(f"report  {Path(result['run_dir']) / 'report.html'}"))
    console.print(Text(f"model   {result['model']}"))
    console.print(Text(f"run     {result['run_dir']}"))


def ledger_line(ledger: Mapping[str, Any]) -> str:
    """Conservation in one line."""
    parts = [f"{ledger['trained']} trained"]
    parts += [f"{count} {reason}" for reason, count in ledger["dropped"].items() if count]
    if ledger["in_flight"]:
        parts.append(f"{ledger['in_flight']} in flight")
    return f"{ledger['dispatched']} rollouts: {', '.join(parts)}"


def _domain_table(domains: Mapping[str, Mapping[str, Any]]) -> Any:
    warmed = _has_warmup(domains)
    headers = ["held-out", "tasks", "before", "after", "gain in points, 95 % interval"]
    if warmed:
        headers.insert(3, "warmed")
        headers.append("part of RL")
    rows = []
    for name, row in domains.items():
        cells = [
            Text(name),
            Text(str(row["n"])),
            _rate(row["before"]),
            _rate(row["after"]),
            _gain(row["diff"], row["ci_low"], row["ci_high"]),
        ]
        if warmed:
            cells.insert(3, _rate(row["warmed"]))
            cells.append(_gain(row["rl_diff"], row["rl_ci_low"], row["rl_ci_high"]))
        rows.append(cells)
    return table(headers, rows)


def _has_warmup(domains: Mapping[str, Mapping[str, Any]]) -> bool:
    return any(row.get("warmed") is not None for row in domains.values())


def _mean_rl(result: Mapping[str, Any]) -> Text:
    mean = result.get("mean") or {}
    if mean.get("rl_diff") is not None:
        return _gain(mean["rl_diff"], mean.get("rl_ci_low"), mean.get("rl_ci_high"))
    parts = [row["rl_diff"] for row in result["domains"].values() if row["rl_diff"] is not None]
    return _gain(sum(parts) / len(parts), None, None) if parts else _NOTHING


def _rate(rate: float | None) -> Text:
    return _NOTHING if rate is None else Text(f"{rate:.1%}")


def _gain(diff: float | None, low: float | None, high: float | None) -> Text:
    if diff is None:
        return _NOTHING
    if low is None or high is None:
        return Text(f"{diff * 100:+.1f}")
    style = "green" if low > 0 else "red" if high < 0 else ""
    return Text(f"{diff * 100:+.1f} [{low * 100:+.1f}, {high * 100:+.1f}]", style=style)


_NOTHING = Text("-", style="dim")
