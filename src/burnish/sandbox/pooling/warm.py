"""How many boxes to keep warm, from what was asked for lately.

Every acquire takes a warm box and starts a replacement, which takes L seconds. With K boxes kept
(warm or on their way), an acquire finds a warm one exactly if fewer than K others were acquired in
the last L seconds: a base-stock rule. With Poisson arrivals at rate r that number is Poisson with
mean r*L, whatever the distribution of L (Palm's theorem), so the least K for a service level p is

    K = quantile(p; r*L) + 1

Arrivals come in batches (a group of rollouts starts at once). A batch of n is one event; with
D = E[n^2] / E[n], the size of the batch that a random box belongs to, demand has D times the
variance of a Poisson, and D boxes are gone before the batch has been served:

    K = ceil(D * (quantile(p; r*L / D) + 1))

D = 1 gives the rule above, and batches of one size n get multiples of n.

The rate is the decayed number of arrivals S over the decayed length of the time watched, a seconds:

    r = S / (m * (1 - exp(-a / m))),   S = sum over arrivals of exp(-age / m)

which is unbiased from the first second on, not only once a is many memories m.
"""

import math
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)

_MEMORY_S = 60.0
# An arrival's weight falls to 1/e in this time: long enough to span the pauses between the turns of
# a rollout (seconds), short enough to follow the change from one training step to the next.

_IDLE_S = 300.0
# A warm box is worth its memory (1 MiB) only if it is likely to be used soon: nothing is kept for a
# key whose next arrival is expected later than this. One lone arrival keeps a box for
# memory * ln(1 + idle / memory) = 108 s.

_LEAST_WATCHED_S = 1.0
# A key counts as watched for at least this long: two arrivals within a millisecond are no evidence
# of 2,000 per second.

_BATCH_GAP_S = 0.001
# Acquires of one `gather` reach us within microseconds of each other; independent ones so close
# together would mean over 1,000 per second, where a batch is the right picture as well.

_CREATE_WEIGHT = 0.2
# Weight of the newest create time: five creates replace most of the estimate.

_FIRST_CREATE_S = 0.05
# Before anything was measured: slower than every native start, faster than every gVisor one.

_FORGET_BELOW = 1e-6
# Decayed arrivals below which a key is as good as never seen (14 memories after its last arrival).


@dataclass(slots=True)
class _Demand:
    """Decayed sums over the batches of one key, as of `at_s`."""

    since_s: float
    at_s: float
    arrivals: float = 0.0
    squares: float = 0.0
    last_s: float = -math.inf
    batch: int = 0
    create_s: float | None = None


class WarmTargets(Generic[Key]):
    """Target numbers of warm boxes per key, such as (image, digest of the policy)."""

    def __init__(
        self,
        budget: int,
        *,
        service_level: float = 0.99,
        memory_s: float = _MEMORY_S,
        idle_s: float = _IDLE_S,
    ) -> None:
        """Start without any demand.

        Args:
            budget: most warm boxes over all keys.
            service_level: share of acquires that should find a warm box, in (0, 1).
            memory_s: time in which an arrival's weight falls to 1/e.
            idle_s: a key whose next arrival is expected later gets none.
        """
        assert budget >= 0
        assert 0 < service_level < 1
        assert memory_s > 0
        assert idle_s > 0
        self._budget = budget
        self._level = service_level
        self._memory_s = memory_s
        self._idle_s = idle_s
        self._demands: dict[Key, _Demand] = {}
        self._create_s = _FIRST_CREATE_S
        self._measured = False

    def observe_arrival(self, key: Key, now_s: float, count: int = 1) -> None:
        """Somebody asked for `count` boxes at once."""
        assert count >= 1
        demand = self._demands.setdefault(key, _Demand(since_s=now_s, at_s=now_s))
        self._decay(demand, now_s)
        if now_s - demand.last_s > _BATCH_GAP_S:
            demand.batch = 0
        # (n + c)^2 - n^2: the batch grows from n to n + c.
        demand.squares += count * (2 * demand.batch + count)
        demand.arrivals += count
        demand.batch += count
        demand.last_s = max(demand.last_s, now_s)

    def observe_create(self, key: Key, seconds: float) -> None:
        """A replacement took this long, from the decision to start it until it was ready."""
        assert seconds >= 0
        if self._measured:
            self._create_s += _CREATE_WEIGHT * (seconds - self._create_s)
        else:
            self._create_s, self._measured = seconds, True
        if demand := self._demands.get(key):
            old = seconds if demand.create_s is None else demand.create_s
            demand.create_s = old + _CREATE_WEIGHT * (seconds - old)

    def targets(self, now_s: float) -> dict[Key, int]:
        """Boxes to keep warm now, for every key with any; within the budget."""
        wants: dict[Key, int] = {}
        rates: dict[Key, float] = {}
        for key, demand in list(self._demands.items()):
            self._decay(demand, now_s)
            if demand.arrivals < _FORGET_BELOW:
                del self._demands[key]
                continue
            rates[key] = self._rate_per_s(demand)
            if wanted := self._wanted(demand, rates[key]):
                wants[key] = wanted
        busiest_first = sorted(wants, key=lambda key: -rates[key])
        return share({key: wants[key] for key in busiest_first}, self._budget)

    def _wanted(self, demand: _Demand, rate_per_s: float) -> int:
        if rate_per_s * self._idle_s < 1:
            return 0
        create_s = self._create_s if demand.create_s is None else demand.create_s
        batch = max(1.0, demand.squares / demand.arrivals)
        mean = rate_per_s * create_s
        if mean >= self._budget:
            return self._budget
        events = poisson_quantile(self._level, mean / batch) + 1
        # A batch decays a little while it comes in: a thousandth of a box more is not one more.
        return min(self._budget, math.ceil(batch * events - 1e-3))

    def _rate_per_s(self, demand: _Demand) -> float:
        watched_s = max(_LEAST_WATCHED_S, demand.at_s - demand.since_s)
        return demand.arrivals / (self._memory_s * -math.expm1(-watched_s / self._memory_s))

    def _decay(self, demand: _Demand, now_s: float) -> None:
        """A clock that seems to go back counts as standing still."""
        elapsed_s = max(0.0, now_s - demand.at_s)
        factor = math.exp(-elapsed_s / self._memory_s)
        demand.arrivals *= factor
        demand.squares *= factor
        demand.at_s += elapsed_s


def share(wants: dict[Key, int], budget: int) -> dict[Key, int]:
    """Max-min fair whole numbers: nobody gets more while one who wants it has two fewer.

    Small wants are met in full, large ones are cut to one level; what does not divide goes to the
    first keys. Keys that get nothing are left out.
    """
    shares: dict[Key, int] = {}
    left = budget
    waiting = len(wants)
    position = {key: index for index, key in enumerate(wants)}
    # Smallest want first: whatever it leaves of its even share raises that of the rest.
    for key in sorted(wants, key=lambda key: (wants[key], -position[key])):
        shares[key] = min(wants[key], left // waiting)
        left -= shares[key]
        waiting -= 1
    return {key: shares[key] for key in wants if shares[key] > 0}


def poisson_quantile(level: float, mean: float) -> int:
    """Least k with P(X <= k) >= level, X Poisson.

    The sum starts 10 standard deviations below the mean: what is left out is below 1e-20, by
    Chernoff's bound exp(-d^2 / (2 mean)) at d = 10 sqrt(mean).
    """
    assert mean >= 0
    assert 0 < level < 1
    if mean == 0:
        return 0
    k = max(0, math.floor(mean - 10 * math.sqrt(mean)))
    term = math.exp(k * math.log(mean) - mean - math.lgamma(k + 1))
    total = term
    # The cap matters only for levels within rounding of 1, where the sum may stay below for ever.
    cap = math.ceil(mean + 12 * math.sqrt(mean) + 40)
    while total < level and k < cap:
        k += 1
        term *= mean / k
        total += term
    return k
