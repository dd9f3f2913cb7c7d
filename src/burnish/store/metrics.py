"""Metrics on disk: one durable entry per step; after a rollback the later rows are gone."""

import threading
from collections.abc import Iterable, Sequence
from pathlib import Path

from burnish.store.schema import METRICS
from burnish.store.segments import Row, SegmentLog, read_rows
from burnish.telemetry.metrics import Sample

_ENTRIES_PER_SEGMENT = 64

Series = dict[str, dict[str, list[tuple[int, float]]]]
"""Name -> label -> [(step, value)], by step."""


class MetricStore:
    """The writer of `metrics/`. May be called from any thread."""

    def __init__(self, directory: Path) -> None:
        """Open or create `directory`."""
        self._lock = threading.Lock()
        self._log = SegmentLog(directory, METRICS, _ENTRIES_PER_SEGMENT)

    def append(self, step: int, samples: Sequence[Sample]) -> None:
        """Make the samples of a step durable. The last value of (step, name, label) counts.

        Raises:
            DiskFullError: nothing was written.
        """
        rows = [{"step": step, "name": s.name, "label": s.label, "value": s.value} for s in samples]
        with self._lock:
            self._log.append(rows)
            self._log.compact()

    def rollback_to(self, step: int) -> None:
        """Forget the rows of later steps."""
        with self._lock:
            self._log.rewrite(lambda row: row["step"] <= step)

    def close(self) -> None:
        """Compact what is waiting."""
        with self._lock:
            self._log.compact(everything=True)


def read_metrics(directory: Path) -> Series:
    """Metrics of a finished or live run."""
    return _series(read_rows(directory, METRICS))


def _series(rows: Iterable[Row]) -> Series:
    latest: dict[str, dict[str, dict[int, float]]] = {}
    for row in rows:
        by_label = latest.setdefault(row["name"], {})
        by_label.setdefault(row["label"], {})[row["step"]] = row["value"]
    return {
        name: {label: sorted(values.items()) for label, values in by_label.items()}
        for name, by_label in latest.items()
    }
