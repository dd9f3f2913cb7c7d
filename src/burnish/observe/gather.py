"""Turns a run directory into `ReportData`. Works on finished, interrupted and running runs."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from math import isfinite
from typing import Any

import msgspec

from burnish.observe.data import (
    Curve,
    DomainResult,
    FailureCount,
    Gate,
    LedgerView,
    LengthRow,
    Origin,
    Panel,
    ReportData,
    Shares,
)
from burnish.observe.token_text import find_token_text
from burnish.observe.transcripts import samples, token_views
from burnish.store.metrics import Series
from burnish.store.reader import RunReader
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
_ENDINGS = {
    EventKind.RUN_FINISHED: "complete",
    EventKind.RUN_INTERRUPTED: "Stopped after step {step}. It can be resumed.",
    EventKind.RUN_FAILED: "An error ended this run after step {step}. It can be resumed.",
}


def gather(reader: RunReader) -> ReportData:
    """Read everything that the page shows."""
    result = reader.result() or {}
    series = reader.metrics()
    events = list(reader.events())
    config = reader.config()
    after = reader.evaluation("after") or []
    return ReportData(
        title=reader.path.absolute().name,
        model=str(config.get("model", {}).get("source", "unknown model")),
        status="complete" if result else _status(events, _num_steps(series)),
        wall_s=result.get("wall_s"),
        peak_rss_bytes=result.get("peak_rss_bytes"),
        num_steps=_num_steps(series),
        domains=_domains(result),
        mean_interval=_mean_interval(result),
        curves=tuple(_curves(series)),
        ledger=_ledger(reader),
        failures=_failures(reader),
        panels=tuple(_panels(series)),
        bottleneck=bottleneck(series),
        lengths=_lengths(reader),
        shares=_shares(series),
        samples=samples(reader.evaluation("before") or [], after),
        token_views=token_views(reader.sample_rollouts(8), find_token_text(reader.path)),
        gates=_gates(events),
        canary={k.replace("_", " "): _plain(v) for k, v in _table(result.get("canary")).items()},
        facts=tuple(_facts(reader)),
        config=tuple(config_origins(reader.config_text())),
    )


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
        if event.kind in _ENDINGS:
            return _ENDINGS[event.kind].format(step=num_steps)
        if event.kind in (EventKind.RUN_STARTED, EventKind.RUN_RESUMED):
            break
    return "This run was still going, or was killed, when this page was written."


def _domains(result: Mapping[str, Any]) -> tuple[DomainResult, ...]:
    names = {field.name for field in msgspec.structs.fields(DomainResult)} - {"name"}
    rows = []
    for name, row in _table(result.get("domains")).items():
        known = {key: value for key, value in row.items() if key in names}
        if all(known.get(key) is not None for key in ("before", "after", "ci_low", "ci_high")):
            rows.append(DomainResult(name=name, **known))
    return tuple(rows)


def _mean_interval(result: Mapping[str, Any]) -> tuple[float, float] | None:
    mean = _table(result.get("mean"))
    low, high = mean.get("ci_low"), mean.get("ci_high")
    return None if low is None or high is None else (float(low), float(high))


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


def _ledger(reader: RunReader) -> LedgerView:
    counts = reader.ledger()
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
    if value is None:
        return {}
    return value if isinstance(value, dict) else {"verdict": value}


def _plain(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return value if isinstance(value, str) else msgspec.json.encode(value, enc_hook=str).decode()
