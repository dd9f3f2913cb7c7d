import math
import random
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from burnish.sandbox.pooling.warm import WarmTargets, poisson_quantile, share


def cdf(k: int, mean: float) -> float:
    terms = (math.exp(i * math.log(mean) - mean - math.lgamma(i + 1)) for i in range(k + 1))
    return math.fsum(terms)


@settings(deadline=None)
@given(level=st.floats(0.01, 0.9999), mean=st.floats(1e-6, 3000))
def test_quantile_is_the_least_count_that_reaches_the_level(level: float, mean: float) -> None:
    k = poisson_quantile(level, mean)
    assert cdf(k, mean) >= level - 1e-9
    if k > 0:
        assert cdf(k - 1, mean) < level + 1e-9


def test_quantile_of_nothing_is_nothing_and_extreme_levels_end() -> None:
    assert poisson_quantile(0.99, 0.0) == 0
    assert poisson_quantile(math.nextafter(1, 0), 5.0) < 200


@settings(deadline=None)
@given(
    wants=st.dictionaries(st.integers(), st.integers(1, 50), max_size=12),
    budget=st.integers(0, 200),
)
def test_shares_are_max_min_fair_and_use_the_budget(wants: dict[int, int], budget: int) -> None:
    got = share(wants, budget)
    assert sum(got.values()) == min(budget, sum(wants.values()))
    assert all(0 < got[key] <= wants[key] for key in got)
    for key in wants:
        if got.get(key, 0) < wants[key]:
            assert all(other <= got.get(key, 0) + 1 for other in got.values())


def test_what_does_not_divide_goes_to_the_first() -> None:
    assert share({"a": 9, "b": 9, "c": 9}, 2) == {"a": 1, "b": 1}


class Simulation:
    """A base-stock pool: every acquire takes a box and starts a replacement."""

    def __init__(self, targets: WarmTargets[str], create_s: float) -> None:
        self.targets = targets
        self.create_s = create_s
        self.ready: deque[float] = deque()
        self.hits = self.asks = 0

    def refill(self, now_s: float) -> None:
        for _ in range(self.targets.targets(now_s).get("k", 0) - len(self.ready)):
            self.ready.append(now_s + self.create_s)
            self.targets.observe_create("k", self.create_s)

    def acquire(self, now_s: float, count: int, *, counted: bool) -> None:
        self.targets.observe_arrival("k", now_s, count)
        for _ in range(count):
            hit = bool(self.ready) and self.ready[0] <= now_s
            if self.ready:
                self.ready.popleft()
            self.hits += hit and counted
            self.asks += counted
        self.refill(now_s)


@pytest.mark.parametrize("rate_per_s", [0.2, 5.0, 50.0])
@pytest.mark.parametrize("create_s", [0.002, 0.3])
@pytest.mark.parametrize("batch", [1, 8])
def test_simulated_arrivals_reach_the_service_level(
    rate_per_s: float, create_s: float, batch: int
) -> None:
    rng = random.Random(7)
    pool = Simulation(WarmTargets(4096, service_level=0.99), create_s)
    now_s = 0.0
    for index in range(4000):
        now_s += rng.expovariate(rate_per_s)
        pool.acquire(now_s, batch, counted=index > 500)
    # 3,500 trials at 0.99: the standard deviation is 0.0017 before the estimate's own noise.
    assert pool.hits / pool.asks >= 0.98


def test_a_lone_arrival_keeps_one_box_for_the_stated_time_and_no_longer() -> None:
    targets = WarmTargets[str](8)
    targets.observe_create("a", 0.002)
    targets.observe_arrival("a", 0.0)
    assert targets.targets(1.0) == {"a": 1}
    end_s = 60 * math.log(1 + 300 / 60)
    assert targets.targets(end_s - 0.01) == {"a": 1}
    assert targets.targets(end_s + 0.01) == {}


@settings(deadline=None)
@given(
    events=st.lists(
        st.tuples(
            st.sampled_from("abcd"),
            st.floats(0, 30),
            st.integers(1, 64),
            st.floats(0, 10),
        ),
        max_size=40,
    ),
    budget=st.integers(0, 20),
)
def test_targets_stay_within_the_budget_and_end_at_nothing(
    events: list[tuple[str, float, int, float]], budget: int
) -> None:
    targets = WarmTargets[str](budget)
    now_s = 0.0
    for key, step_s, count, create_s in events:
        now_s += step_s
        targets.observe_arrival(key, now_s, count)
        targets.observe_create(key, create_s)
        found = targets.targets(now_s)
        assert sum(found.values()) <= budget
        assert all(number > 0 for number in found.values())
    before = sum(targets.targets(now_s).values())
    for later_s in range(0, 2000, 50):
        after = sum(targets.targets(now_s + later_s).values())
        assert after <= before
        before = after
    assert before == 0


@settings(deadline=None)
@given(rate=st.integers(1, 40), low=st.floats(0.001, 1), factor=st.floats(1, 20))
def test_more_demand_or_slower_creates_never_ask_for_fewer(
    rate: int, low: float, factor: float
) -> None:
    def wanted(per_s: int, create_s: float) -> int:
        targets = WarmTargets[str](4096)
        for index in range(per_s * 20):
            targets.observe_arrival("a", index / per_s)
        targets.observe_create("a", create_s)
        return targets.targets(20.0)["a"]

    assert wanted(rate, low) <= wanted(rate, low * factor)
    assert wanted(rate, low) <= wanted(rate * 2, low)


def test_acquires_of_one_gather_count_as_a_batch() -> None:
    one_call, many_calls = WarmTargets[str](64), WarmTargets[str](64)
    for start_s in (0.0, 10.0, 20.0):
        one_call.observe_arrival("a", start_s, 16)
        for index in range(16):
            many_calls.observe_arrival("a", start_s + index * 1e-5)
    assert one_call.targets(20.001)["a"] == many_calls.targets(20.001)["a"] == 16


def test_a_clock_that_goes_back_counts_as_standing_still() -> None:
    targets = WarmTargets[str](8)
    targets.observe_arrival("a", 100.0)
    targets.observe_arrival("a", 50.0)
    assert targets.targets(40.0) == {"a": targets.targets(100.0)["a"]}


def test_the_busiest_keys_come_first_when_the_budget_is_short() -> None:
    targets = WarmTargets[str](2)
    for index in range(30):
        if index % 10 == 0:
            targets.observe_arrival("rare", float(index))
        targets.observe_arrival("busy", index + 0.1)
        targets.observe_arrival("busier", index + 0.2, 2)
    assert set(targets.targets(30.0)) == {"busy", "busier"}


def test_keys_that_nobody_asks_for_are_forgotten() -> None:
    targets = WarmTargets[int](8)
    for key in range(1000):
        targets.observe_arrival(key, 0.0)
    targets.targets(60 * 15.0)
    assert not targets._demands
