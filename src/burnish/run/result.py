"""`result.json`: how a run ended, in one small table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from burnish.evaluate.comparison import Comparison, compare
from burnish.evaluate.result import EvaluationResult
from burnish.store.ledger_counts import LedgerCounts
from burnish.telemetry.events import Event, EventKind


def worked_seconds(events: Iterable[Event]) -> float:
    """Wall time of all sessions of a run, the pauses between them left out."""
    total = began = last = 0.0
    for event in events:
        if event.kind in (EventKind.RUN_STARTED, EventKind.RUN_RESUMED):
            total += last - began
            began = event.t
        last = event.t
    return total + last - began


def domain_table(results: Mapping[str, EvaluationResult]) -> dict[str, dict[str, Any]]:
    """Pass rates and paired 95 % intervals per domain.

    `diff` is against the base model; `rl_diff` is against the warmed model, or where there was no
    warm-up against the base as well.
    """
    if "before" not in results or "after" not in results:
        return {}
    overall = compare(results["before"], results["after"])
    warmed = results.get("warmed")
    learned = compare(warmed, results["after"]) if warmed is not None else overall
    return {name: _row(name, overall, learned, warmed is not None) for name in overall.domains}


def _row(name: str, overall: Comparison, learned: Comparison, has_warmed: bool) -> dict[str, Any]:
    whole, part = overall.domains[name], learned.domains[name]
    if whole.n == 0:
        # No task has a score on both sides: an invented 0 would read like a result.
        return {"n": 0} | dict.fromkeys(_FIGURES)
    return {
        "n": whole.n,
        "before": whole.before,
        "warmed": part.before if has_warmed else None,
        "after": whole.after,
        "diff": whole.diff,
        "ci_low": whole.ci_low,
        "ci_high": whole.ci_high,
        "rl_diff": part.diff,
        "rl_ci_low": part.ci_low,
        "rl_ci_high": part.ci_high,
    }


_FIGURES = (
    "before",
    "warmed",
    "after",
    "diff",
    "ci_low",
    "ci_high",
    "rl_diff",
    "rl_ci_low",
    "rl_ci_high",
)


def run_result(
    *,
    run_dir: Path,
    wall_s: float,
    peak_rss_bytes: int,
    results: Mapping[str, EvaluationResult],
    ledger: LedgerCounts,
    canary: Mapping[str, Any],
    versions: Mapping[str, str],
    quarantined: Mapping[str, str],
    model: Path,
) -> dict[str, Any]:
    """All of `result.json`."""
    domains = domain_table(results)
    result: dict[str, Any] = {
        "run_dir": str(run_dir),
        "model": str(model),
        "wall_s": wall_s,
        "peak_rss_bytes": peak_rss_bytes,
        "domains": domains,
        "quarantined": dict(quarantined),
        "ledger": {
            "dispatched": ledger.dispatched,
            "trained": ledger.trained,
            "in_flight": ledger.in_flight,
            "dropped": dict(ledger.dropped),
        },
        "canary": dict(canary),
        "versions": dict(versions),
    }
    if domains:
        overall = compare(results["before"], results["after"])
        learned = compare(results.get("warmed", results["before"]), results["after"])
        result["mean"] = {
            "diff": overall.mean_diff,
            "ci_low": overall.mean_ci_low,
            "ci_high": overall.mean_ci_high,
            "rl_diff": learned.mean_diff,
            "rl_ci_low": learned.mean_ci_low,
            "rl_ci_high": learned.mean_ci_high,
        }
    return result
