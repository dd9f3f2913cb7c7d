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
    console.print()
    console.print(Text(ledger_line(result["ledger"])))
    for name, reason in result["quarantined"].items():
        console.print(Text(printable(f"{name} was quarantined: {reason}", keep=""), style="yellow"))
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
    warmed = any(row.get("warmed") is not None for row in domains.values())
    headers = ["held-out", "tasks", "before", "after", "gain in points, 95 % interval"]
    if warmed:
        headers.append("part of RL")
    rows = []
    for name, row in domains.items():
        cells = [
            Text(name),
            Text(str(row["n"])),
            Text(f"{row['before']:.1%}"),
            Text(f"{row['after']:.1%}"),
            _gain(row["diff"], row["ci_low"], row["ci_high"]),
        ]
        if warmed:
            cells.append(_gain(row["rl_diff"], row["rl_ci_low"], row["rl_ci_high"]))
        rows.append(cells)
    return table(headers, rows)


def _gain(diff: float | None, low: float | None, high: float | None) -> Text:
    if diff is None or low is None or high is None:
        return Text("-", style="dim")
    style = "green" if low > 0 else "red" if high < 0 else ""
    return Text(f"{diff * 100:+.1f} [{low * 100:+.1f}, {high * 100:+.1f}]", style=style)
