"""Durations and lengths learned online: quantiles that forget, in constant memory.

A histogram with buckets a constant ratio apart (DDSketch, Masson et al. 2019: every quantile is
right within that ratio) whose older counts decay, so that a policy that learns to think longer is
noticed. A key seen too rarely borrows from all the others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

# Neighbouring buckets differ by this factor: quantiles are right to within 7 %.
_RATIO = 1.15
_LOG_RATIO = math.log(_RATIO)
# Smaller values share a bucket: a microsecond, or a millionth of a token.
_LEAST = 1e-6
# Per observation: remembers about 200, the episodes of a dozen groups.
_DECAY = 0.995
_RESCALE_AT = 1e12


class Sketch:
    """Decayed quantiles of positive numbers."""

    def __init__(self, decay: float = _DECAY) -> None:
        """Empty."""
        self._decay = decay
        self._buckets: dict[int, float] = {}
        # Instead of fading all counts at each observation, new ones weigh more and more.
        self._weight = 1.0
        self._total = 0.0
        self._sum = 0.0
        self.count = 0

    def add(self, value: float) -> None:
        """Take one observation."""
        assert math.isfinite(value), value
        assert value >= 0.0, value
        self._weight /= self._decay
        bucket = math.ceil(math.log(max(value, _LEAST)) / _LOG_RATIO)
        self._buckets[bucket] = self._buckets.get(bucket, 0.0) + self._weight
        self._total += self._weight
        self._sum += self._weight * value
        self.count += 1
        if self._weight > _RESCALE_AT:
            self._rescale()

    def mean(self) -> float:
        """Decayed mean; 0.0 when empty."""
        return self._sum / self._total if self._total else 0.0

    def quantile(self, q: float, above: float = 0.0) -> float:
        """The q-quantile of the observations greater than `above`; `above` itself if there is none.

        Conditioning on `above` is how long something that has lasted so long will last in all.
        """
        floor = math.ceil(math.log(max(above, _LEAST)) / _LOG_RATIO) if above > 0 else None
        rows = sorted((b, w) for b, w in self._buckets.items() if floor is None or b > floor)
        wanted = q * sum(w for _, w in rows)
        reached = 0.0
        for bucket, weight in rows:
            reached += weight
            if reached >= wanted:
                # The middle of the bucket, in the sense of the least relative error.
                return max(2.0 * _RATIO**bucket / (1.0 + _RATIO), above)
        return above

    def state(self) -> dict[str, Any]:
        """All that `from_state` needs, as JSON values."""
        return {
            "buckets": sorted(self._buckets.items()),
            "weight": self._weight,
            "total": self._total,
            "sum": self._sum,
            "count": self.count,
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Sketch:
        """Rebuild exactly."""
        sketch = cls()
        sketch._buckets = {int(b): float(w) for b, w in state["buckets"]}
        sketch._weight, sketch._total = state["weight"], state["total"]
        sketch._sum, sketch.count = state["sum"], state["count"]
        return sketch

    def _rescale(self) -> None:
        scale = 1.0 / self._weight
        # What has faded below a millionth of one observation is gone.
        self._buckets = {b: w * scale for b, w in self._buckets.items() if w * scale > 1e-6}
        self._total = sum(self._buckets.values())
        self._sum *= scale
        self._weight = 1.0


class Durations:
    """Sketches by key, with the sketch of everything behind those that are too young."""

    def __init__(self, min_count: int = 8) -> None:
        """Empty; a key with fewer than `min_count` observations borrows."""
        self._min_count = min_count
        self._all = Sketch()
        self._keys: dict[str, Sketch] = {}

    def observe(self, key: str, value: float) -> None:
        """Something of that key lasted so long."""
        self._keys.setdefault(key, Sketch()).add(value)
        self._all.add(value)

    def count(self, key: str) -> int:
        """Observations of that key."""
        sketch = self._keys.get(key)
        return sketch.count if sketch is not None else 0

    def quantile(self, key: str, q: float, above: float = 0.0) -> float:
        """How long a thing of that key lasts, given that it has already lasted `above`."""
        return self._sketch(key).quantile(q, above)

    def overall(self, q: float) -> float:
        """Quantile over all keys."""
        return self._all.quantile(q)

    def mean(self, key: str) -> float:
        """Mean of that key."""
        return self._sketch(key).mean()

    def forget(self, key: str) -> None:
        """The key is gone."""
        self._keys.pop(key, None)

    def state(self) -> dict[str, Any]:
        """All that `load` needs."""
        return {"all": self._all.state(), "keys": {k: s.state() for k, s in self._keys.items()}}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`."""
        self._all = Sketch.from_state(state["all"])
        self._keys = {k: Sketch.from_state(s) for k, s in state["keys"].items()}

    def _sketch(self, key: str) -> Sketch:
        sketch = self._keys.get(key)
        return self._all if sketch is None or sketch.count < self._min_count else sketch
