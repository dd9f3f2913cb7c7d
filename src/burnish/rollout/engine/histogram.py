"""How long things took: a few counts instead of every value."""

from bisect import bisect_left
from typing import NamedTuple

# 0.25 ms to 36 minutes, each bound sqrt(2) times the last: a quantile is right within 20%.
BOUNDS_S = tuple(0.00025 * 2 ** (k / 2) for k in range(47))


class Histogram(NamedTuple):
    """A snapshot."""

    counts: tuple[int, ...]
    """Values up to each bound of BOUNDS_S and above the one before; the last: above all."""
    sum_s: float
    """Of all values."""

    @property
    def num(self) -> int:
        """Values seen."""
        return sum(self.counts)

    @property
    def mean_s(self) -> float:
        """Arithmetic mean; 0 if there are none."""
        return self.sum_s / self.num if self.num else 0.0

    def quantile_s(self, q: float) -> float:
        """The bound that at least a share `q` of the values does not exceed; 0 if there are none.

        Above the last bound, that bound: the answer stays finite.
        """
        wanted, seen = q * self.num, 0
        for count, bound in zip(self.counts, (*BOUNDS_S, BOUNDS_S[-1]), strict=True):
            seen += count
            if count and seen >= wanted:
                return bound
        return 0.0

    def since(self, older: "Histogram") -> "Histogram":
        """What came after an earlier snapshot of the same."""
        counts = tuple(a - b for a, b in zip(self.counts, older.counts, strict=True))
        return Histogram(counts, self.sum_s - older.sum_s)


class Timer:
    """Collects values."""

    def __init__(self) -> None:
        """Nothing seen."""
        self._counts = [0] * (len(BOUNDS_S) + 1)
        self._sum_s = 0.0

    def add(self, seconds: float, number: int = 1) -> None:
        """Count `number` values of `seconds` each."""
        self._counts[bisect_left(BOUNDS_S, seconds)] += number
        self._sum_s += seconds * number

    def snapshot(self) -> Histogram:
        """What was seen so far."""
        return Histogram(tuple(self._counts), self._sum_s)
