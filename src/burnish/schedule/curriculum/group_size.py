"""How many samples each task gets: a knapsack over a fixed number of rollouts.

A group of N at pass rate p carries gradient with probability 1 - p**N - (1 - p)**N, and what it
carries is worth about p (1 - p)**2 (Knapsack RL, arXiv 2509.25849). The product is concave in N, so
giving one rollout after the other to the task that gains most by it is optimal.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from burnish.schedule.values.columns import Floats


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
    if least == most:
        return [least] * len(pass_rates)
    gains = np.array([_gains(p, least, most) for p in pass_rates])
    left = max(num_rollouts - least * len(pass_rates), 0)
    # Stable, so that earlier groups come first on ties and a group's own rollouts keep their order.
    best = np.argsort(-gains, axis=None, kind="stable")[:left]
    taken = np.bincount(best // gains.shape[1], minlength=len(pass_rates))
    return [least + int(num) for num in taken]


def _gains(pass_rate: float, least: int, most: int) -> Floats:
    """What each rollout beyond `least` adds to a group; never more than the one before it."""
    p, q = pass_rate, 1.0 - pass_rate
    sizes = np.arange(least, most)
    gains: Floats = (p**sizes * q + q**sizes * p) * p * q * q
    # Rounding must not make a later one dearer than an earlier one.
    return np.minimum.accumulate(gains)


def _num_taken(others: Floats, own: Floats, num: int) -> int:
    """How many of `own` are among the `num` greatest of all; others come first on ties."""
    every = np.concatenate((others, own))
    if num <= 0 or num >= len(every):
        return len(own) if num > 0 else 0
    bar = np.partition(every, len(every) - num)[len(every) - num]
    left = num - int((every > bar).sum()) - int((others == bar).sum())
    return int((own > bar).sum()) + min(max(left, 0), int((own == bar).sum()))


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
        # Gains of the groups before, one behind the other: they are looked at again every time.
        self._gains: Floats = np.zeros(0)

    def next(self, pass_rate: float) -> int:
        """Samples of the next group, whose task is expected to pass at `pass_rate`."""
        if self._least >= self._most:
            return self._mean
        own = _gains(pass_rate, self._least, self._most)
        # What earlier groups had beyond the mean is taken back from all groups of the window.
        num = (self._mean - self._least) * (len(self._rates) + 1) - self._over
        size = self._least + _num_taken(self._gains, own, num)
        self._rates.append(pass_rate)
        self._gains = np.concatenate((self._gains, own))[-len(own) * len(self._rates) :]
        self._over += size - self._mean
        return size

    def state(self) -> dict[str, Any]:
        """All that `load` needs."""
        return {"rates": list(self._rates), "over": self._over}

    def load(self, state: Mapping[str, Any]) -> None:
        """Take over what `state` returned."""
        self._rates.clear()
        self._rates.extend(float(rate) for rate in state["rates"])
        gains = [_gains(rate, self._least, self._most) for rate in self._rates]
        self._gains = np.concatenate(gains) if gains else np.zeros(0)
        self._over = int(state["over"])
