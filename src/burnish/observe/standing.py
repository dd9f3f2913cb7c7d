"""How a run stands, domain by domain: of a live one by what it says, of another by its records.

control socket --status--> standing_of --.
                                         |--> Standing --> `burnish top`
run directory --events, metrics----------'
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from burnish.core.records import Record
from burnish.store.metrics import Series
from burnish.store.reader import RunReader
from burnish.store.run_directory import is_in_use
from burnish.telemetry import catalogue
from burnish.telemetry.events import Event, EventKind
from burnish.telemetry.metrics import Metric

_ENDS = {
    EventKind.RUN_FINISHED: "finished",
    EventKind.RUN_INTERRUPTED: "stopped",
    EventKind.RUN_FAILED: "failed",
}
_BEGINS = (EventKind.RUN_STARTED, EventKind.RUN_RESUMED)


class DomainStanding(Record, frozen=True, kw_only=True):
    """One domain."""

    domain: str
    """Environment name."""
    share: float
    """Target share of the budget."""
    cost_ratio: float | None
    """Part of the cost that went to it."""
    pass_rate: float | None
    """Recent, of training items."""
    gain_per_cost: float | None
    """Posterior gain in pass rate per unit of cost."""
    wait: int | None
    """Groups of others since its last one."""
    bound: int | None
    """Most that it can ever wait."""
    breaker: str
    """State of its worst breaker; in records, how often they opened; empty if all is well."""
    quarantined: str | None
    """Why it is shut out."""
    why: str
    """Reasons for its share."""
    items: str
    """Which of its items are chosen, and why."""


class Standing(Record, frozen=True, kw_only=True):
    """A whole run."""

    state: str
    """training, paused, or of records: finished, stopped, failed, killed, busy (not training)."""
    note: str = ""
    """Why it failed, or how it goes on."""
    is_live: bool
    """Whether the run itself answered."""
    step: int
    """Finished steps."""
    num_steps: int | None
    """Of the run."""
    engine_tokens_per_s: float | None
    """Sampled, in the last step."""
    trainer_tokens_per_s: float | None
    """Trained, in the last step."""
    engine_idle: float | None
    """Share of the last step in which the engine computed nothing."""
    trainer_idle: float | None
    """The same of the trainer."""
    running: int | None
    """Requests that are decoded now."""
    waiting: int | None
    """Requests that wait for a slot."""
    load_target: float | None
    """Requests per slot that are aimed at."""
    groups: dict[str, int]
    """In generation and waiting to be trained, if it is live."""
    domains: tuple[DomainStanding, ...]
    """Greatest share first."""


def live_standing(status: Mapping[str, Any]) -> Standing:
    """From the answer of a live run's control socket."""
    figures, flow, counts = status["figures"], status["flow"], status["groups"]
    breakers: dict[str, str] = {}
    for row in status["breakers"]:
        if row["state"] == "closed":
            continue
        kind = f"{row['kind']} {row['image']}".rstrip()
        breakers[row["domain"]] = f"{row['state']}: {kind}, {row['retry_in_s']:.0f} s"
    domains = [
        DomainStanding(
            domain=row["domain"],
            share=row["share"],
            cost_ratio=row["cost_ratio"],
            pass_rate=row["pass_rate"],
            gain_per_cost=row["gain_per_cost"],
            wait=row["wait_picks"],
            bound=row["max_gap_picks"],
            breaker=breakers.get(row["domain"], ""),
            quarantined=row["quarantined"],
            why=status["why"].get(row["domain"], ""),
            items=status["items"].get(row["domain"], ""),
        )
        for row in status["domains"]
    ]
    return Standing(
        state="paused" if status["paused"] else "training",
        is_live=True,
        step=status["step"],
        num_steps=status["num_steps"],
        engine_tokens_per_s=figures.get(catalogue.ENGINE_TOKENS_PER_S.name),
        trainer_tokens_per_s=figures.get(catalogue.TRAINER_TOKENS_PER_S.name),
        engine_idle=_rest(figures.get(catalogue.ENGINE_BUSY_RATIO.name)),
        trainer_idle=_rest(figures.get(catalogue.TRAINER_BUSY_RATIO.name)),
        running=status["engine"]["running"],
        waiting=status["engine"]["waiting"],
        load_target=flow.get("load_target"),
        groups={"running": counts["running"], "waiting": counts["waiting"]},
        domains=_sorted(domains),
    )


def recorded_standing(reader: RunReader) -> Standing:
    """From what a run wrote; the run may be over, dead, or not training yet.

    Raises:
        UserError: a record is damaged.
    """
    series, told = reader.metrics(), _Told(reader)
    state, note = told.state, told.reason
    if state == "unknown" and is_in_use(reader.path):
        state = "busy"
    elif state == "unknown":
        state = "killed"
    if state in ("stopped", "killed"):
        note = f"go on with: burnish run --resume {shlex.quote(str(reader.path))}"
    config = reader.config().get("run", {})
    shares = _of_last_step(series, catalogue.DOMAIN_SHARE)
    bounds = _of_last_step(series, catalogue.DOMAIN_MAX_GAP)
    domains = []
    for name, share in shares.items():
        row = told.rows.get(name, {})
        opened = told.opened.get(name, 0)
        rates = series.get(catalogue.PASS_RATE.name, {}).get(name, [])
        domains.append(
            DomainStanding(
                domain=name,
                share=share,
                cost_ratio=row.get("cost_ratio"),
                pass_rate=rates[-1][1] if rates else None,
                gain_per_cost=row.get("gain_per_cost"),
                wait=row.get("wait_picks"),
                bound=int(bounds[name]) if name in bounds else None,
                breaker=f"opened {opened}x" if opened else "",
                quarantined=told.quarantined.get(name),
                why=told.why.get(name, ""),
                items=told.items.get(name, ""),
            )
        )
    return Standing(
        state=state,
        note=note,
        is_live=False,
        step=max((s for s, _ in _points(series, catalogue.STEP_SECONDS)), default=0),
        num_steps=config.get("steps"),
        engine_tokens_per_s=_last(series, catalogue.ENGINE_TOKENS_PER_S),
        trainer_tokens_per_s=_last(series, catalogue.TRAINER_TOKENS_PER_S),
        engine_idle=_rest(_last(series, catalogue.ENGINE_BUSY_RATIO)),
        trainer_idle=_rest(_last(series, catalogue.TRAINER_BUSY_RATIO)),
        running=None,
        waiting=None,
        load_target=None,
        groups={},
        domains=_sorted(domains),
    )


class _Told:
    """The latest word of the events on each thing."""

    def __init__(self, reader: RunReader) -> None:
        self.state, self.reason = "unknown", ""
        self.opened: dict[str, int] = {}
        self.quarantined: dict[str, str] = {}
        self._shares: Event | None = None
        for event in reader.events():
            self._read(event)

    def _read(self, event: Event) -> None:
        match event.kind:
            case EventKind.SHARES_DECIDED:
                self._shares = event
            case EventKind.BREAKER_OPENED:
                name = str(event.data.get("domain"))
                self.opened[name] = self.opened.get(name, 0) + 1
            case EventKind.ENVIRONMENT_QUARANTINED:
                name = str(event.data.get("domain"))
                self.quarantined[name] = str(event.data.get("reason"))
            case kind if kind in _BEGINS:
                # Nobody answers, and no end was written yet.
                self.state, self.reason = "unknown", ""
            case kind if kind in _ENDS:
                self.state, self.reason = _ENDS[kind], str(event.data.get("reason", ""))

    @property
    def rows(self) -> Mapping[str, Mapping[str, Any]]:
        """Figures by domain; runs of older programs have none."""
        return self._of("rows")

    @property
    def why(self) -> Mapping[str, str]:
        """Reasons by domain."""
        return self._of("why")

    @property
    def items(self) -> Mapping[str, str]:
        """Choice of items by domain."""
        return self._of("items")

    def _of(self, part: str) -> Mapping[str, Any]:
        found = self._shares.data.get(part) if self._shares is not None else None
        return found if isinstance(found, dict) else {}


def _sorted(domains: list[DomainStanding]) -> tuple[DomainStanding, ...]:
    return tuple(sorted(domains, key=lambda d: (-d.share, d.domain)))


def _points(series: Series, metric: Metric) -> list[tuple[int, float]]:
    return series.get(metric.name, {}).get("", [])


def _last(series: Series, metric: Metric) -> float | None:
    points = _points(series, metric)
    return points[-1][1] if points else None


def _of_last_step(series: Series, metric: Metric) -> dict[str, float]:
    """By label; a domain that was removed has no value at the last step."""
    found = {label: points[-1] for label, points in series.get(metric.name, {}).items() if points}
    last = max((step for step, _ in found.values()), default=0)
    return {label: value for label, (step, value) in found.items() if step == last}


def _rest(busy: float | None) -> float | None:
    return None if busy is None else 1.0 - busy
