import math
import random
from statistics import NormalDist

import pytest
from hypothesis import given
from hypothesis import strategies as st

from burnish.evaluate.intervals import (
    Interval,
    cluster_bootstrap,
    mean_of_independent,
    tango_paired,
    wilson,
)

Z = NormalDist().inv_cdf(0.975)


@given(st.integers(1, 300), st.data())
def test_wilson_ends_solve_the_score_equation(num, data):
    passed = data.draw(st.integers(0, num))
    low, high = wilson(passed, num)
    assert 0.0 <= low <= passed / num <= high <= 1.0
    for end in (low, high):
        if 0.0 < end < 1.0:
            error = math.sqrt(end * (1 - end) / num)
            assert abs(passed / num - end) / error == pytest.approx(Z, rel=1e-6)


def test_wilson_agrees_with_its_closed_form_at_the_ends():
    assert wilson(0, 10).high == pytest.approx(Z**2 / (10 + Z**2), rel=1e-12)
    assert wilson(10, 10).low == pytest.approx(10 / (10 + Z**2), rel=1e-12)
    assert wilson(0, 0) == Interval(0.0, 1.0)


@given(st.integers(1, 200))
def test_tango_without_discordance_has_its_closed_form(num):
    low, high = tango_paired(0, 0, num)
    assert high == pytest.approx(Z**2 / (num + Z**2), rel=1e-9)
    assert low == pytest.approx(-high, rel=1e-9)


@given(st.integers(0, 40), st.integers(0, 40), st.integers(0, 40))
def test_tango_excludes_zero_exactly_when_the_uncorrected_mcnemar_test_rejects(up, down, same):
    num = up + down + same
    low, high = tango_paired(up, down, num)
    if up + down:
        z = (up - down) / math.sqrt(up + down)
        assert (low > 0.0) == (z > Z)
        assert (high < 0.0) == (z < -Z)
    else:
        assert low < 0.0 < high


@given(st.integers(0, 40), st.integers(0, 40), st.integers(0, 40))
def test_tango_is_antisymmetric_contains_the_estimate_and_is_never_a_point(up, down, same):
    num = up + down + same
    low, high = tango_paired(up, down, num)
    other = tango_paired(down, up, num)
    assert low == pytest.approx(-other.high, abs=1e-9)
    if num:
        assert -1.0 <= low <= (up - down) / num <= high <= 1.0
    assert high - low > 1.0 / (num + 1)


def coverage(num, up, down):
    """Exact coverage of tango_paired at true chances `up` and `down`, by enumeration."""
    covered = 0.0
    for i in range(num + 1):
        for j in range(num - i + 1):
            ways = math.comb(num, i) * math.comb(num - i, j)
            chance = ways * up**i * down**j * (1 - up - down) ** (num - i - j)
            low, high = tango_paired(i, j, num)
            covered += chance * (low <= up - down <= high)
    return covered


@pytest.mark.parametrize("num", [5, 12, 25])
@pytest.mark.parametrize("discordance", [0.02, 0.1, 0.2, 0.4, 0.8])
@pytest.mark.parametrize("share", [0.5, 0.8, 1.0])
def test_tango_covers_the_truth_by_enumeration(num, discordance, share):
    # Nominal 95 %. With five pairs the law has few values and coverage swings around that.
    least = 0.92 if num == 5 else 0.94
    assert coverage(num, discordance * share, discordance * (1 - share)) >= least


@given(st.lists(st.sampled_from([-1.0, -0.5, 0.0, 0.25, 1.0]), min_size=1, max_size=30))
def test_bootstrap_contains_the_mean_is_never_a_point_and_repeats_itself(diffs):
    interval = cluster_bootstrap(diffs, num_resamples=200)
    mean = sum(diffs) / len(diffs)
    assert interval.low <= mean <= interval.high
    assert interval.high - interval.low > 0.0
    assert interval == cluster_bootstrap(diffs, num_resamples=200)


@pytest.mark.parametrize("value", [-1.0, 0.0, 1.0])
@pytest.mark.parametrize("num", [1, 2, 3])
def test_a_handful_of_equal_tasks_proves_nothing(value, num):
    low, high = cluster_bootstrap([value] * num)
    assert low <= 0.0 <= high


def draw_tasks(rng, num, rate, gain, samples=4, concentration=1.0):
    """Task differences with strongly correlated samples inside a task."""
    diffs = []
    for _ in range(num):
        p = rng.betavariate(rate * concentration, (1 - rate) * concentration)
        before = sum(rng.random() < p for _ in range(samples))
        after = sum(rng.random() < (p + gain * (1 - p)) for _ in range(samples))
        diffs.append((after - before) / samples)
    return diffs


@pytest.mark.parametrize(("num", "rate", "gain"), [(10, 0.3, 0.2), (40, 0.3, 0.0), (60, 0.2, 0.3)])
def test_cluster_bootstrap_covers_the_truth_in_clustered_data(num, rate, gain):
    rng = random.Random(0)
    truth = gain * (1 - rate)
    runs = 300
    hits = 0
    for run in range(runs):
        interval = cluster_bootstrap(draw_tasks(rng, num, rate, gain), num_resamples=400, seed=run)
        hits += interval.low <= truth <= interval.high
    # 92 % demanded, less three standard errors of the simulation.
    assert hits / runs >= 0.92 - 3 * math.sqrt(0.92 * 0.08 / runs)


def test_ignoring_clusters_would_be_too_narrow():
    rng = random.Random(1)
    tasks = [[d] * 10 for d in draw_tasks(rng, 30, 0.4, 0.0, samples=1)]
    clustered = cluster_bootstrap([t[0] for t in tasks])
    pooled = cluster_bootstrap([d for t in tasks for d in t])
    assert clustered.high - clustered.low > 2 * (pooled.high - pooled.low)


def test_mean_of_equal_independent_intervals_narrows_with_the_root_of_their_number():
    one = Interval(0.1, 0.5)
    four = mean_of_independent([0.3] * 4, [one] * 4)
    assert four.low == pytest.approx(0.3 - 0.2 / 2)
    assert four.high == pytest.approx(0.3 + 0.2 / 2)
    assert mean_of_independent([0.3], [one]) == pytest.approx(one)
