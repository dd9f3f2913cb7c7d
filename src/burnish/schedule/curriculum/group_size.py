"""How many samples each task gets: a knapsack over a fixed number of rollouts.

A group of N at pass rate p carries gradient with probability 1 - p**N - (1 - p)**N, and what it
carries is worth about p (1 - p)**2 (Knapsack RL, arXiv 2509.25849). The product is concave in N, so
giving one rollout after the other to the task that gains most by it is optimal.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any


def group_value(size: int, pass_rate: float) -> float:
    """What a group of `size` is worth."""
    p, q = pass_rate, 1.0 - pass_rate
    return (1.0 - p**size - q**size) * p * q * q


def group_sizes(
    pass_rates: Sequence[float], num_rollouts: int, *, least: int = 2, most: int = 64
) -> list[int]:
    """Sizes in [least, most] that sum to `num_rollouts`, or as near as the bounds allow."""
    assert 1 <= least <= most
    assert all(0.0 <= p <= 1.0 for p in pass_rates)
    sizes = [least] * len(pass_rates)
    left = num_rollouts - sum(sizes)
    queue = [(_gain(least, p), i) for i, p in enumerate(pass_rates) if least < most]
    heapq.heapify(queue)
    while left > 0 and queue:
        _, i = heapq.heappop(queue)
        sizes[i] += 1
        left -= 1
        if sizes[i] < most:
            heapq.heappush(queue, (_gain(sizes[i], pass_rates[i]), i))
    return sizes


def _gain(size: int, pass_rate: float) -> float:
    """Of one more rollout, negative for the heap."""
    return group_value(size, pass_rate) - group_value(size + 1, pass_rate)


class GroupSizes:
    """The knapsack one group at a time: each is sized beside the groups that came before it."""

    def __init__(self, group_size: int, ratio: float, window: int) -> None:
        """Groups of `group_size` on average, over about `window` of them.

        Args:
            group_size: mean.
            ratio: of the largest group to the mean, and of the mean to the smallest.
            window: groups that compete for samples, this one included.
        """
        self._mean, self._least = group_size, max(2, math.ceil(group_size / ratio))
        self._most = max(math.floor(group_size * ratio), group_size)
        self._rates: deque[float] = deque(maxlen=max(window - 1, 1))
        self._over = 0

    def next(self, pass_rate: float) -> int:
        """Samples of the next group, whose task is expected to pass at `pass_rate`."""
        if self._least >= self._most:
            return self._mean
        rates = [*self._rates, pass_rate]
        # What earlier groups had beyond the mean is taken back from all groups of the window.
        left = max(self._mean * len(rates) - self._over, 0)
        size = group_sizes(rates, left, least=self._least, most=self._most)[-1]
        self._rates.append(pass_rate)
        self._over += size - self._mean
        return size

    def state(self) -> dict[str, Any]:
        """All that `load` needs."""
        return {"rates": list(self._rates), "over": self._over}

    def load(self, state: Mapping[str, Any]) -> None:
        """Take over what `state` returned."""
        self._rates.clear()
        self._rates.extend(float(rate) for rate in state["rates"])
        self._over = int(state["over"])
