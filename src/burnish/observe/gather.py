"""Turns a run directory into `ReportData`. Works on finished, interrupted and running runs."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from math import isfinite
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from burnish.core.errors import UserError
from burnish.core.records import Rollout
from burnish.observe.data import (
    CanaryFact,
    Curve,
    FailureCount,
    Gate,
    Interval,
    LedgerView,
    LengthRow,
    Origin,
    Panel,
    ReportData,
    Shares,
)
from burnish.observe.outcomes import domain_results, lost_domains
from burnish.observe.token_text import find_token_text
from burnish.observe.transcripts import samples, token_views
from burnish.store.ledger_counts import LedgerCounts
from burnish.store.metrics import Series
from burnish.store.reader import RunReader
from burnish.store.run_directory import EvalName
from burnish.telemetry import catalogue
from burnish.telemetry.events import Event, EventKind
from burnish.telemetry.metrics import Metric

_PANELS: tuple[tuple[str, Metric], ...] = (
    ("Engine", catalogue.ENGINE_TOKENS_PER_S),
    ("Trainer", catalogue.TRAINER_TOKENS_PER_S),
    ("Engine busy", catalogue.ENGINE_BUSY_RATIO),
    ("Trainer busy", catalogue.TRAINER_BUSY_RATIO),
    ("Lag", catalogue.LAG_MEAN),
    ("Seconds per step", catalogue.STEP_SECONDS),
    ("Entropy", catalogue.ENTROPY),
    ("Engine against trainer", catalogue.KL_ENGINE_K3),
    ("Gradient norm", catalogue.GRAD_NORM),
)
_PARTS = ("config.resolved.toml", "ledger.sqlite", "metrics", "evals", "events.jsonl")
_CANARY = {
    "ok": ("engine serves the trained weights", "", "Anything but yes would have stopped the run."),
    "num_checks": ("checks", "", "One after each delivery of weights to the engine."),
    "max_abs_diff": (
        "largest difference",
        "nats",
        "Between engine and trainer on any probe token.",
    ),
    "tolerance": ("allowed difference", "nats", "0 demands equal bits."),
    "probe_tokens": ("length of the probe", "tokens", "The fixed text that both score."),
    "version": ("version of the weights", "", "Deliveries up to the last check."),
}

T = TypeVar("T")


class _Reading:
    """Reads what can be read and remembers what cannot."""

    def __init__(self, run: Path) -> None:
        missing = [name for name in _PARTS if not (run / name).exists()]
        self.problems = [f"{name} is missing from this run directory." for name in missing]
        self._missing = missing

    def __call__(self, read: Callable[[], T], otherwise: T) -> T:
        try:
            return read()
        except UserError as error:
            # What is missing was named already.
            if not any(error.what.endswith(f"{name}: missing.") for name in self._missing):
                self.problems.append(error.what)
            return otherwise


def gather(reader: RunReader) -> ReportData:
    """Read everything that the page shows; what cannot be read is named on the page."""
    read = _Reading(reader.path)
    result = read(reader.result, None) or {}
    series: Series = read(reader.metrics, {})
    events: list[Event] = read(lambda: list(reader.events()), [])
    config: dict[str, Any] = read(reader.config, {})
    before, after = (
        _evaluation(reader, read, EvalName(name), bool(result.get("domains")))
        for name in ("before", "after")
    )
    gates = _gates(events)
    counts = read(reader.ledger, None)
    if counts is None and not any("ledger.sqlite" in problem for problem in read.problems):
        read.problems.append("ledger.sqlite holds no ledger.")
    return ReportData(
        title=_title(reader, config),
        model=str(_table(config.get("model")).get("source", "unknown model")),
        status="complete" if result else _status(events, _num_steps(series)),
        wall_s=result.get("wall_s"),
        peak_rss_bytes=result.get("peak_rss_bytes"),
        num_steps=_num_steps(series),
        domains=domain_results(result),
        lost=lost_domains(result),
        mean_gain=_mean_gain(result, "diff", "ci_low", "ci_high"),
        mean_rl_gain=_mean_gain(result, "rl_diff", "rl_ci_low", "rl_ci_high"),
        steps_with_gradient=_steps_with_gradient(series),
        quarantined={g.name: g.detail for g in gates if not g.passed}
        | {name: str(reason) for name, reason in _table(result.get("quarantined")).items()},
        curves=tuple(_curves(series)),
        ledger=_ledger(counts),
        failures=read(lambda: _failures(reader), ()),
        panels=tuple(_panels(series)),
        bottleneck=bottleneck(series),
        lengths=read(lambda: _lengths(reader), ()),
        shares=_shares(series),
        samples=samples(before, after),
        token_views=read(
            lambda: token_views(reader.latest_trained_groups(), find_token_text(reader.path)), ()
        ),
        gates=gates,
        canary=tuple(_canary(result)),
        facts=tuple(_facts(reader)),
        config=tuple(config_origins(read(reader.config_text, "") if config else "")),
        problems=tuple(dict.fromkeys(read.problems)),
    )


def _evaluation(reader: RunReader, read: _Reading, name: EvalName, needed: bool) -> list[Rollout]:
    unreadable: list[Rollout] | None = []
    found = read(lambda: reader.evaluation(name), unreadable)
    if found is None and needed:
        read.problems.append(f"evals/{name}.parquet is missing from this run directory.")
    return found or []


def _title(reader: RunReader, config: Mapping[str, Any]) -> str:
    """The name that the run was given: a copied directory may be called anything."""
    name = _table(config.get("run")).get("name")
    if not name:
        return reader.path.absolute().name
    return f"{name}, {reader.manifest.created_at[:16].replace('T', ' ')}"


def _canary(result: Mapping[str, Any]) -> Iterator[CanaryFact]:
    for key, value in _table(result.get("canary")).items():
        name, unit, meaning = _CANARY.get(key, (key.replace("_", " "), "", ""))
        text = {True: "yes", False: "no"}[value] if isinstance(value, bool) else _plain(value)
        yield CanaryFact(name=name, value=f"{text} {unit}".rstrip(), meaning=meaning)


def bottleneck(series: Series) -> str:
    """Who waited for whom, from the busy shares of engine and trainer."""
    engine = _mean(series, catalogue.ENGINE_BUSY_RATIO)
    trainer = _mean(series, catalogue.TRAINER_BUSY_RATIO)
    if engine is None or trainer is None:
        return ""
    busy = f"The engine computed {engine:.0%} of the time, the trainer {trainer:.0%}"
    if max(engine, trainer) < 0.5:
        return f"{busy}: both waited, so look at environments and sandboxes."
    if abs(engine - trainer) < 0.1:
        return f"{busy}: they keep pace."
    slow, fast = ("sampling", "trainer") if engine > trainer else ("training", "engine")
    return f"{busy}: {slow} is the bottleneck, and the {fast} waits for it."


def config_origins(text: str) -> Iterator[Origin]:
    """Keys, values and origins of a `config.resolved.toml`."""
    section = ""
    for line in text.splitlines():
        if line.startswith("["):
            section = line.strip("[]") + "."
            continue
        body, _, origin = line.rpartition("  # ")
        key, equals, value = body.partition(" = ")
        if equals:
            yield Origin(key=section + key, value=value, origin=origin)


def _status(events: list[Event], num_steps: int) -> str:
    for event in reversed(events):
        if event.kind is EventKind.RUN_FINISHED:
            return "complete"
        if event.kind is EventKind.RUN_INTERRUPTED:
            return f"Stopped after step {num_steps}. It can be resumed."
        if event.kind is EventKind.RUN_FAILED:
            reason = " ".join(str(event.data.get("reason") or "the reason is unknown").split())
            return f"This run failed after step {num_steps}: {reason}. It can be resumed."
        if event.kind in (EventKind.RUN_STARTED, EventKind.RUN_RESUMED):
            break
    return "This run was still going, or was killed, when this page was written."


def _mean_gain(result: Mapping[str, Any], diff: str, low: str, high: str) -> Interval | None:
    """From the result; without it the mean of the rows, which has no interval."""
    mean = _table(result.get("mean"))
    if mean.get(diff) is not None:
        return Interval(diff=float(mean[diff]), low=mean.get(low), high=mean.get(high))
    rows = [row for row in _table(result.get("domains")).values() if row.get(diff) is not None]
    return Interval(diff=sum(row[diff] for row in rows) / len(rows)) if rows else None


def _steps_with_gradient(series: Series) -> int | None:
    if not _num_steps(series):
        return None
    points = series.get(catalogue.GRAD_NORM.name, {}).get("", [])
    return sum(isfinite(value) and value > 0 for _, value in points)


def _curves(series: Series) -> Iterator[Curve]:
    rewards = series.get(catalogue.REWARD_MEAN.name, {})
    rates = series.get(catalogue.PASS_RATE.name, {})
    for domain in sorted(rewards):
        rate = dict(rates.get(domain, ()))
        points = [(s, r, rate[s]) for s, r in rewards[domain] if s in rate and isfinite(r)]
        yield Curve(
            domain=domain,
            steps=tuple(p[0] for p in points),
            reward=tuple(p[1] for p in points),
            pass_rate=tuple(p[2] for p in points),
        )


def _ledger(counts: LedgerCounts | None) -> LedgerView:
    if counts is None:
        return LedgerView(dispatched=0, trained=0, in_flight=0, dropped={})
    return LedgerView(
        dispatched=counts.dispatched,
        trained=counts.trained,
        in_flight=counts.in_flight,
        dropped=dict(sorted(counts.dropped.items(), key=lambda item: -item[1])),
    )


def _failures(reader: RunReader) -> tuple[FailureCount, ...]:
    counts: Counter[tuple[str, str]] = Counter()
    first: dict[tuple[str, str], str] = {}
    for record in reader.failures():
        key = (str(record.failure.kind), record.failure.where)
        counts[key] += 1
        first.setdefault(key, record.failure.message)
    return tuple(
        FailureCount(kind=key[0], where=key[1], message=first[key], count=count)
        for key, count in counts.most_common()
    )


def _panels(series: Series) -> Iterator[Panel]:
    for title, metric in _PANELS:
        points = series.get(metric.name, {}).get("", [])
        if points:
            yield Panel(
                title=title,
                unit="" if metric.unit == "1" else metric.unit,
                meaning=metric.meaning,
                steps=tuple(step for step, _ in points),
                values=tuple(value for _, value in points),
            )


def _lengths(reader: RunReader) -> tuple[LengthRow, ...]:
    scored: dict[str, list[int]] = defaultdict(list)
    trained: dict[str, list[int]] = defaultdict(list)
    for rollout, advantages in reader.rollouts():
        if rollout.verdict.score is None:
            continue
        scored[rollout.domain].append(rollout.num_sampled_tokens)
        if advantages is not None:
            trained[rollout.domain].append(rollout.num_sampled_tokens)
    return tuple(
        LengthRow(
            domain=domain,
            num_all=len(scored[domain]),
            mean_all=sum(scored[domain]) / len(scored[domain]),
            tail_all=_tail(scored[domain]),
            num_trained=len(trained[domain]),
            mean_trained=sum(trained[domain]) / max(len(trained[domain]), 1),
            tail_trained=_tail(trained[domain]),
        )
        for domain in sorted(scored)
    )


def _shares(series: Series) -> Shares | None:
    found = {k: dict(v) for k, v in series.get(catalogue.DOMAIN_SHARE.name, {}).items()}
    steps = sorted({step for values in found.values() for step in values})
    if not steps:
        return None
    totals = {step: sum(values.get(step, 0.0) for values in found.values()) for step in steps}
    return Shares(
        steps=tuple(steps),
        by_domain={
            domain: tuple(values.get(step, 0.0) / (totals[step] or 1.0) for step in steps)
            for domain, values in sorted(found.items())
        },
    )


def _gates(events: list[Event]) -> tuple[Gate, ...]:
    """The latest word on each environment."""
    gates: dict[str, Gate] = {}
    for event in events:
        name = str(event.data.get("domain", ""))
        if not name:
            continue
        if event.kind is EventKind.ENVIRONMENT_QUARANTINED:
            gates[name] = Gate(name=name, passed=False, detail=str(event.data.get("reason", "")))
        elif event.kind is EventKind.ENVIRONMENT_CHECKED:
            passed = event.data.get("verdict") == "pass"
            detail = str(event.data.get("reason", "")) or "all checks passed"
            gates[name] = Gate(name=name, passed=passed, detail=detail)
    return tuple(gates.values())


def _facts(reader: RunReader) -> Iterator[tuple[str, str]]:
    manifest = reader.manifest
    yield "started", manifest.created_at
    versions = {"burnish": manifest.burnish_version, **manifest.versions}
    yield "versions", ", ".join(f"{name} {number}" for name, number in versions.items())
    for name, value in manifest.hardware.items():
        if name.endswith("_bytes") and isinstance(value, int | float):
            yield name.removesuffix("_bytes"), f"{value / 1e9:.1f} GB"
        else:
            yield name.removeprefix("num_").replace("_", " "), _plain(value)
    yield "seed", str(manifest.seed)
    yield "weights", manifest.model_digest
    yield from ((f"environment {n}", digest) for n, digest in manifest.environments.items())
    yield "run directory", str(reader.path.absolute())


def _num_steps(series: Series) -> int:
    # Every step takes time; a step whose groups all scored the same has no loss.
    points = series.get(catalogue.STEP_SECONDS.name, {}).get("", [])
    return max((step for step, _ in points), default=0)


def _mean(series: Series, metric: Metric) -> float | None:
    values = [v for _, v in series.get(metric.name, {}).get("", []) if isfinite(v)]
    return sum(values) / len(values) if values else None


def _tail(lengths: list[int]) -> float:
    ranked = sorted(lengths)
    return float(ranked[min(len(ranked) - 1, int(len(ranked) * 0.9))]) if ranked else 0.0


def _table(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _plain(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return value if isinstance(value, str) else msgspec.json.encode(value, enc_hook=str).decode()
