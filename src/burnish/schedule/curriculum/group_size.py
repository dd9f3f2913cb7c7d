"""How many samples each task gets: a knapsack over a fixed number of rollouts.

A group of N at pass rate p carries gradient with probability 1 - p**N - (1 - p)**N, and what it
carries is worth about p (1 - p)**2 (Knapsack RL, arXiv 2509.25849). The product is concave in N, so
giving one rollout after the other to the task that gains most by it is optimal.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence


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
