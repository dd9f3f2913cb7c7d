"""A run as its readers see it: dashboards, reports, diagnosis. No lock; the run may be live."""

import tomllib
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from burnish.core.errors import UserError
from burnish.core.records import Rollout
from burnish.store.ledger_counts import LedgerCounts, read_counts
from burnish.store.manifest import Manifest, read_manifest
from burnish.store.metrics import Series, read_metrics
from burnish.store.rollouts import StoredRollout, read_evaluation, read_rollouts
from burnish.store.run_directory import EvalName, FailureRecord
from burnish.telemetry.events import Event, read_events
from burnish.telemetry.jsonl import read_lines


class RunReader:
    """Reads a run directory. Nothing is cached: each call sees the present state.

    Raises:
        UserError: from the constructor, if `path` is no run directory or one of another version.
    """

    def __init__(self, path: Path) -> None:
        """Check that `path` is a run directory."""
        self.path = path
        self.manifest: Manifest = read_manifest(path)

    def config(self) -> dict[str, Any]:
        """`config.resolved.toml`."""
        return tomllib.loads(self.config_text())

    def config_text(self) -> str:
        """`config.resolved.toml` with the origins as comments."""
        return (self.path / "config.resolved.toml").read_text()

    def result(self) -> dict[str, Any] | None:
        """`result.json`; None while the run is not finished."""
        path = self.path / "result.json"
        if not path.exists():
            return None
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])

    def metrics(self) -> Series:
        """Name -> label -> [(step, value)]; the label is empty for metrics without one."""
        return read_metrics(self.path / "metrics")

    def ledger(self) -> LedgerCounts | None:
        """Totals; None before the ledger exists."""
        return read_counts(self.path / "ledger.sqlite")

    def events(self) -> Iterator[Event]:
        """What happened, in order."""
        return read_events(self.path / "events.jsonl")

    def failures(self) -> Iterator[FailureRecord]:
        """Classified failures, in order."""
        path = self.path / "failures.jsonl"
        for number, line in enumerate(read_lines(path), 1):
            try:
                yield msgspec.json.decode(line, type=FailureRecord)
            except msgspec.MsgspecError as error:
                what = f"{path}:{number}: not a failure record ({error})."
                raise UserError(what, fix="delete this line; the rest is whole.") from None

    def evaluation(self, name: EvalName | str) -> list[Rollout] | None:
        """Rollouts of an evaluation; None if it was not made (yet)."""
        path = self.path / "evals" / f"{EvalName(name)}.parquet"
        return read_evaluation(path) if path.exists() else None

    def rollouts(self, domain: str | None = None) -> Iterator[StoredRollout]:
        """Training rollouts in the order of completion, with advantages where trained."""
        found = read_rollouts(self.path / "rollouts")
        return (s for s in found if domain is None or s.rollout.domain == domain)

    def sample_rollouts(self, per_domain: int) -> dict[str, list[StoredRollout]]:
        """The latest training rollouts of each domain, newest first."""
        latest: dict[str, deque[StoredRollout]] = {}
        for stored in self.rollouts():
            latest.setdefault(stored.rollout.domain, deque(maxlen=per_domain)).append(stored)
        return {domain: list(reversed(found)) for domain, found in sorted(latest.items())}
