"""Latencies as counts: right within the width of a bucket, and by difference."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from burnish.rollout.engine.histogram import BOUNDS_S, Timer


@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=50), st.floats(0.01, 1.0))
def test_a_quantile_is_the_next_bound_above_the_exact_one(values: list[float], q: float) -> None:
    timer = Timer()
    for value in values:
        timer.add(value)
    snapshot = timer.snapshot()
    rank = next(i for i in range(len(values)) if i + 1 >= q * len(values))
    exact = sorted(values)[rank]
    assert snapshot.quantile_s(q) == min(bound for bound in BOUNDS_S if bound >= exact)
    assert snapshot.mean_s == pytest.approx(sum(values) / len(values))
    assert snapshot.num == len(values)


def test_a_difference_holds_only_what_came_later() -> None:
    timer = Timer()
    timer.add(5.0)
    before = timer.snapshot()
    timer.add(0.001, 3)
    later = timer.snapshot().since(before)
    assert later.num == 3
    assert later.sum_s == pytest.approx(0.003)
    assert later.quantile_s(1.0) < 0.0015


def test_nothing_seen_is_zero_and_endless_is_the_last_bound() -> None:
    timer = Timer()
    assert timer.snapshot().quantile_s(0.5) == timer.snapshot().mean_s == 0.0
    timer.add(1e9)
    assert timer.snapshot().quantile_s(0.5) == BOUNDS_S[-1]
