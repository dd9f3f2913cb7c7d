"""`burnish simulate`: what a scheduling policy would do, without a model or a machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

if TYPE_CHECKING:
    from burnish.plan.comparison import Comparison


def simulate(
    *scenarios: str,
    policy: list[str] | None = None,
    tier: str = "s",
    seeds: int = 3,
    plot: Path | None = None,
    as_json: Annotated[bool, Parameter(name="--json")] = False,
) -> None:
    """Compare policies on simulated scenarios; without a name, list them.

    Args:
        scenarios: names, or "all".
        policy: one to run, may be repeated; all that the scenario knows if absent.
        tier: s (seconds), m (300 domains) or l (1,000 domains).
        seeds: worlds drawn; the intervals are over them.
        plot: draw the curves into this file, which ends in .png, .svg or .html.
        as_json: print one JSON object per scenario.
    """
    from burnish.cli.console import people, write_json
    from burnish.plan.comparison import compare_all, record, tier_of
    from burnish.plan.picture import check_target, draw
    from burnish.plan.registry import scenario
    from burnish.plan.registry import scenarios as known

    if not scenarios:
        _list({name: found.summary for name, found in known().items()}, as_json=as_json)
        return
    names = tuple(known()) if scenarios == ("all",) else scenarios
    chosen = [scenario(name) for name in names]
    wanted = [(s, tuple(policy or s.policies())) for s in chosen]
    if plot is not None:
        check_target(plot)
    done = compare_all(wanted, tier_of(tier), seeds)
    for comparison in done:
        if as_json:
            write_json(record(comparison))
        else:
            people().print(_table(comparison))
    if plot is not None:
        draw(done, plot)


def _list(summaries: dict[str, str], *, as_json: bool) -> None:
    from burnish.cli.console import people, table, write_json

    if as_json:
        write_json({"scenarios": summaries})
    else:
        people().print(table(("scenario", "what happens"), list(summaries.items())))


def _table(comparison: Comparison) -> object:
    from burnish.cli.console import table

    names = list(comparison.results[0].metrics)
    rows = [
        (
            result.policy,
            *(interval.text("+-") for interval in result.metrics.values()),
        )
        for result in comparison.results
    ]
    return table((f"{comparison.scenario} ({comparison.seeds_text})", *names), rows)
