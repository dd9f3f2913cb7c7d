"""The text format of Prometheus, version 0.0.4: families of numbers for whoever scrapes."""

import bisect
import math
import threading
from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import NamedTuple

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
"""Upper ends of classes for times: from a warm box to a long command."""


class Kind(StrEnum):
    """What a scraper may do with the numbers."""

    COUNTER = "counter"
    """Only grows, but for a restart: take its rate. The name ends in `_total`."""
    GAUGE = "gauge"
    """Goes up and down."""
    HISTOGRAM = "histogram"
    """Counts in classes, cumulative, with sum and count."""


class Point(NamedTuple):
    """One line."""

    value: float
    labels: Mapping[str, str] = {}
    suffix: str = ""
    """Of the name: `_bucket`, `_sum` or `_count` of histograms."""


class Family(NamedTuple):
    """All numbers of one name."""

    name: str
    """`[a-z0-9_]+`, with its base unit."""
    kind: Kind
    meaning: str
    """One sentence for people."""
    points: tuple[Point, ...]


class Histogram:
    """Durations of one kind. May be used from any thread."""

    def __init__(self, ends: tuple[float, ...] = SECONDS) -> None:
        """Start empty, with classes up to and including each of `ends`, ascending."""
        self._ends = ends
        self._counts = [0] * (len(ends) + 1)
        self._sum = 0.0
        self._lock = threading.Lock()

    def add(self, value: float) -> None:
        """Count one."""
        with self._lock:
            self._counts[bisect.bisect_left(self._ends, value)] += 1
            self._sum += value

    def points(self) -> tuple[Point, ...]:
        """Its lines."""
        with self._lock:
            counts, total = list(self._counts), self._sum
        found, seen = [], 0
        for end, count in zip((*self._ends, math.inf), counts, strict=True):
            seen += count
            found.append(Point(seen, {"le": number(end)}, "_bucket"))
        return (*found, Point(total, {}, "_sum"), Point(seen, {}, "_count"))


def render(families: Iterable[Family]) -> str:
    """The text of a scrape."""
    lines = []
    for family in families:
        meaning = family.meaning.replace("\\", r"\\").replace("\n", r"\n")
        lines.append(f"# HELP {family.name} {meaning}\n# TYPE {family.name} {family.kind}\n")
        lines += (_line(family.name, point) for point in family.points)
    return "".join(lines)


def number(value: float) -> str:
    """As the format writes it."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return repr(value)


def _line(name: str, point: Point) -> str:
    labels = ",".join(f'{label}="{_escaped(text)}"' for label, text in point.labels.items())
    return f"{name}{point.suffix}{f'{{{labels}}}' if labels else ''} {number(point.value)}\n"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
