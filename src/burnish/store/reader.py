"""A run as its readers see it: dashboards, reports, diagnosis. No lock; the run may be live."""

import sqlite3
import tomllib
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from burnish.core.errors import UserError, one_line
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
        with _damage_told(self.path / "config.resolved.toml"):
            return tomllib.loads(self.config_text())

    def config_text(self) -> str:
        """`config.resolved.toml` with the origins as comments."""
        path = self.path / "config.resolved.toml"
        with _damage_told(path):
            return path.read_text(encoding="utf-8")

    def result(self) -> dict[str, Any] | None:
        """`result.json`; None while the run is not finished."""
        path = self.path / "result.json"
        if not path.exists():
            return None
        with _damage_told(path):
            found = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
            msgspec.convert(found, _Result)
            return found

    def metrics(self) -> Series:
        """Name -> label -> [(step, value)]; the label is empty for metrics without one."""
        path = self.path / "metrics"
        with _damage_told(path):
            return read_metrics(path)

    def ledger(self) -> LedgerCounts | None:
        """Totals; None before the ledger exists."""
        path = self.path / "ledger.sqlite"
        with _damage_told(path):
            return read_counts(path)

    def events(self) -> Iterator[Event]:
        """What happened, in order."""
        path = self.path / "events.jsonl"
        with _damage_told(path):
            yield from read_events(path)

    def failures(self) -> Iterator[FailureRecord]:
        """Classified failures, in order."""
        path = self.path / "failures.jsonl"
        with _damage_told(path):
            for number, line in enumerate(read_lines(path), 1):
                try:
                    yield msgspec.json.decode(line, type=FailureRecord)
                except msgspec.MsgspecError as error:
                    what = f"{path}:{number}: not a failure record ({error})."
                    raise UserError(what, fix="delete this line; the rest is whole.") from None

    def evaluation(self, name: EvalName | str) -> list[Rollout] | None:
        """Rollouts of an evaluation; None if it was not made (yet)."""
        path = self.path / "evals" / f"{EvalName(name)}.parquet"
        if not path.exists():
            return None
        with _damage_told(path):
            return read_evaluation(path)

    def rollouts(self, domain: str | None = None) -> Iterator[StoredRollout]:
        """Training rollouts in the order of completion, with advantages where trained."""
        path = self.path / "rollouts"
        with _damage_told(path):
            found = read_rollouts(path)
            yield from (s for s in found if domain is None or s.rollout.domain == domain)

    def sample_rollouts(self, per_domain: int) -> dict[str, list[StoredRollout]]:
        """The latest training rollouts of each domain, newest first."""
        latest: dict[str, deque[StoredRollout]] = {}
        for stored in self.rollouts():
            latest.setdefault(stored.rollout.domain, deque(maxlen=per_domain)).append(stored)
        return {domain: list(reversed(found)) for domain, found in sorted(latest.items())}

    def latest_trained_groups(self) -> dict[str, list[StoredRollout]]:
        """Of each domain the trained rollouts of the group that finished last."""
        latest: dict[str, list[StoredRollout]] = {}
        for stored in self.rollouts():
            if stored.advantages is None or not any(stored.advantages):
                continue
            group = latest.setdefault(stored.rollout.domain, [])
            if group and group[0].rollout.group_id != stored.rollout.group_id:
                group.clear()
            group.append(stored)
        return dict(sorted(latest.items()))


class _Row(msgspec.Struct, frozen=True, kw_only=True):
    """What readers rely on in a row of `result.json`."""

    n: int | None = None
    before: float | None = None
    warmed: float | None = None
    after: float | None = None
    diff: float | None = None
    ci_low: float | None = None
    ci_high: float | None = None
    rl_diff: float | None = None
    rl_ci_low: float | None = None
    rl_ci_high: float | None = None


class _Result(msgspec.Struct, frozen=True, kw_only=True):
    """What readers rely on in `result.json`."""

    domains: dict[str, _Row] = {}
    mean: dict[str, float | None] | None = None
    wall_s: float | None = None
    peak_rss_bytes: int | None = None
    quarantined: dict[str, str] = {}
    canary: dict[str, Any] = {}


@contextmanager
def _damage_told(path: Path) -> Iterator[None]:
    """Whatever a file that is absent, cut short or of other content raises, as one line."""
    try:
        yield
    except UserError:
        raise
    except FileNotFoundError:
        what = f"{path}: missing."
        raise UserError(what, fix="restore it from a copy of the run.") from None
    except OSError as error:
        what = f"{path}: cannot be read ({error.strerror})."
        raise UserError(what, fix="make it readable, or restore it from a copy.") from None
    except (
        ValueError,
        KeyError,
        TypeError,
        AssertionError,
        RecursionError,
        sqlite3.Error,
    ) as error:
        what = f"{path}: damaged ({one_line(error)})."
        raise UserError(what, fix="restore it from a copy of the run.") from None
