"""Bad cases on their way to the quality gate: typed, counted, bounded, each told once."""

from __future__ import annotations

from collections import OrderedDict

from burnish.core.records import Failure, Record
from burnish.core.vocabulary import FailureKind
from burnish.schedule.breakers.panel import REPEATS


class BadCase(Record, frozen=True, kw_only=True):
    """An item or image that the gate should look at."""

    domain: str
    """Environment name."""
    task: str
    """`{domain}/{index}` of the item."""
    image: str
    """Box image; empty if none."""
    digest: str
    """Environment digest that it was seen under: a fixed environment starts afresh."""
    kind: FailureKind
    """Who is to blame."""
    where: str
    """Which call failed."""
    message: str
    """What it said, the first time."""
    num_seen: int
    """Times since it was last handed over."""


class CaseQueue:
    """First in, first out; equal cases are counted, not repeated."""

    def __init__(self, limit: int = 1024) -> None:
        """Keep at most `limit` cases; the oldest gives way, and `num_lost` says so."""
        self._limit = limit
        self._cases: OrderedDict[tuple[str, str, str, str], BadCase] = OrderedDict()
        self.num_lost = 0

    def __len__(self) -> int:
        """Cases that wait."""
        return len(self._cases)

    def report(self, domain: str, task: str, image: str, digest: str, failure: Failure) -> bool:
        """A failure was seen; True if it is one for the gate."""
        if failure.kind not in REPEATS:
            return False
        key = (task, digest, failure.kind.value, failure.where)
        before = self._cases.get(key)
        self._cases[key] = BadCase(
            domain=domain,
            task=task,
            image=image,
            digest=digest,
            kind=failure.kind,
            where=failure.where,
            message=failure.message if before is None else before.message,
            num_seen=1 if before is None else before.num_seen + 1,
        )
        if len(self._cases) > self._limit:
            self._cases.popitem(last=False)
            self.num_lost += 1
        return True

    def take(self, most: int | None = None) -> tuple[BadCase, ...]:
        """Hand over the oldest."""
        count = len(self._cases) if most is None else min(most, len(self._cases))
        return tuple(self._cases.popitem(last=False)[1] for _ in range(count))
