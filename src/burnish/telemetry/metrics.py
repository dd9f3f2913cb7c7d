"""Metrics are declared once, with unit, reduction and meaning; nothing undeclared is recorded."""

import math
import threading
from collections.abc import Iterable, Iterator, Mapping
from enum import StrEnum

from burnish.core.records import Record


class Reduction(StrEnum):
    """How several records of one step become one value."""

    LAST = "last"
    """The latest."""
    MEAN = "mean"
    """Arithmetic mean."""
    SUM = "sum"
    """Sum."""
    MAX = "max"
    """Largest; nan if any is."""
    MIN = "min"
    """Smallest; nan if any is."""


class Metric(Record, frozen=True, kw_only=True):
    """The declaration of a metric."""

    name: str
    """`[a-z0-9_]+`, ending in the unit where it has one."""
    unit: str
    """`tokens/s`, `nats`, `ratio`, `1`, ..."""
    reduction: Reduction
    """Within a step."""
    meaning: str
    """One sentence for people."""
    label: str = ""
    """What its label names (`domain`, `reason`); empty if it has none."""


class Sample(Record, frozen=True, kw_only=True):
    """A reduced value of one step."""

    name: str
    """Name of a declared metric."""
    label: str
    """Value of its label, or empty."""
    value: float
    """May be nan: a loss that is not a number is a finding, not an error."""


class Registry:
    """The set of declared metrics."""

    def __init__(self, metrics: Iterable[Metric] = ()) -> None:
        """Declare `metrics`."""
        self._metrics: dict[str, Metric] = {}
        for metric in metrics:
            self.declare(metric)

    def declare(self, metric: Metric) -> Metric:
        """Add a metric. Declaring the same again is fine; declaring a rival is our bug."""
        known = self._metrics.setdefault(metric.name, metric)
        assert known == metric, f"metric {metric.name} is declared twice, differently"
        return metric

    def __getitem__(self, name: str) -> Metric:
        assert name in self._metrics, f"metric {name} is not declared (telemetry/catalogue.py)"
        return self._metrics[name]

    def __contains__(self, name: str) -> bool:
        return name in self._metrics

    def __iter__(self) -> Iterator[Metric]:
        return iter(self._metrics.values())


class Recorder:
    """Collects the records of the current step. May be called from any thread."""

    def __init__(self, registry: Registry) -> None:
        """Accept the metrics of `registry`."""
        self._registry = registry
        self._lock = threading.Lock()
        self._values: dict[tuple[str, str], list[float]] = {}

    def record(self, metric: Metric | str, value: float, label: str = "") -> None:
        """Note a value. Undeclared metrics, missing labels and non-numbers are our bugs."""
        name = metric if isinstance(metric, str) else metric.name
        declared = self._registry[name]
        assert isinstance(metric, str) or metric == declared, f"{name}: another declaration"
        assert isinstance(value, int | float), f"{name}: {type(value).__name__} is not a number"
        assert not isinstance(value, bool), f"{name}: a bool is not a number"
        assert bool(label) == bool(declared.label), f"{name}: label {label!r}, {declared.label!r}"
        with self._lock:
            self._values.setdefault((name, label), []).append(float(value))

    def record_all(self, values: Mapping[str, float]) -> None:
        """Note several metrics without labels."""
        for name, value in values.items():
            self.record(name, value)

    def take(self) -> list[Sample]:
        """The reduced values since the last call, in the order of first record; starts anew."""
        with self._lock:
            values, self._values = self._values, {}
        return [
            Sample(name=name, label=label, value=reduce(self._registry[name].reduction, found))
            for (name, label), found in values.items()
        ]


def reduce(reduction: Reduction, values: list[float]) -> float:
    """One value for a non-empty list."""
    if reduction is Reduction.LAST:
        return values[-1]
    if any(math.isnan(v) for v in values):
        return math.nan
    match reduction:
        case Reduction.SUM:
            return sum(values)
        case Reduction.MEAN:
            return sum(values) / len(values)
        case Reduction.MAX:
            return max(values)
        case Reduction.MIN:
            return min(values)
