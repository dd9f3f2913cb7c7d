import itertools
import math
import random
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from burnish.evaluate.significance import (
    detectable_effect,
    holm,
    mcnemar_exact,
    noninferiority_power,
    pass_at_k,
    sign_flip_exact,
)


def test_mcnemar_values_known_by_hand():
    assert mcnemar_exact(0, 0) == 1.0
    assert mcnemar_exact(5, 0) == 2 / 32
    assert mcnemar_exact(6, 0) == 2 / 64
    assert mcnemar_exact(8, 1) == pytest.approx(2 * (1 + 9) / 512, rel=1e-15)
    assert mcnemar_exact(4, 4) == 1.0


@settings(deadline=None)
@given(st.integers(0, 60), st.integers(0, 60), st.integers(0, 20))
def test_sign_flip_equals_mcnemar_for_one_sample_per_task(up, down, same):
    diffs = [Fraction(1)] * up + [Fraction(-1)] * down + [Fraction(0)] * same
    assert sign_flip_exact(diffs) == pytest.approx(mcnemar_exact(up, down), rel=1e-9)


@settings(deadline=None)
@given(st.lists(st.fractions(-1, 1, max_denominator=6), max_size=9))
def test_sign_flip_agrees_with_enumeration_of_all_flips(diffs):
    observed = abs(sum(diffs))
    flips = list(itertools.product((1, -1), repeat=len(diffs)))
    extreme = sum(
        abs(sum(s * d for s, d in zip(signs, diffs, strict=True))) >= observed for signs in flips
    )
    assert sign_flip_exact(diffs) == pytest.approx(extreme / len(flips), rel=1e-12)


def test_differences_off_the_grid_never_make_the_p_value_too_small():
    rng = random.Random(0)
    for _ in range(30):
        diffs = [Fraction(rng.randrange(-97, 98), rng.choice([97, 89])) for _ in range(8)]
        observed = abs(sum(diffs))
        flips = list(itertools.product((1, -1), repeat=8))
        exact = sum(
            abs(sum(s * d for s, d in zip(signs, diffs, strict=True))) >= observed
            for signs in flips
        ) / len(flips)
        assert sign_flip_exact(diffs) >= exact - 1e-12


def test_holm_matches_its_definition():
    adjusted = holm({"a": 0.01, "b": 0.04, "c": 0.03, "d": 0.005})
    assert adjusted == pytest.approx({"a": 0.03, "b": 0.06, "c": 0.06, "d": 0.02})
    assert holm({}) == {}


@given(st.dictionaries(st.text(max_size=3), st.floats(0, 1), min_size=1, max_size=12))
def test_holm_keeps_order_and_lies_between_raw_and_bonferroni(p_values):
    adjusted = holm(p_values)
    assert list(adjusted) == list(p_values)
    for name, p in p_values.items():
        assert p <= adjusted[name] <= min(len(p_values) * p, 1.0) or adjusted[name] >= p
        assert adjusted[name] <= 1.0
    ranked = sorted(p_values, key=p_values.get)
    assert [adjusted[n] for n in ranked] == sorted(adjusted.values())
    assert adjusted[ranked[0]] == min(len(p_values) * p_values[ranked[0]], 1.0)


@given(st.integers(1, 8), st.data())
def test_pass_at_k_is_the_chance_over_all_subsets(num, data):
    passed = data.draw(st.integers(0, num))
    k = data.draw(st.integers(1, num))
    subsets = list(itertools.combinations([True] * passed + [False] * (num - passed), k))
    assert pass_at_k(num, passed, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def test_detectable_effect_is_the_textbook_sample_size_turned_around():
    # n = 7.85 d / effect^2: 628 pairs find 5 points at 20 % discordance.
    diffs = [1.0] * 63 + [-1.0] * 63 + [0.0] * 502
    assert detectable_effect(diffs) == pytest.approx(0.05, rel=0.01)
    assert detectable_effect([]) == 1.0
    # Five tasks without any discordance have seen nothing.
    assert detectable_effect([0.0] * 5) > 0.5


def test_noninferiority_power_is_the_textbook_sample_size_turned_around():
    # n = 6.18 d / margin^2: 1,374 pairs for 3 points at 20 % discordance, one-sided.
    diffs = [1.0] * 137 + [-1.0] * 138 + [0.0] * 1099
    assert noninferiority_power(diffs, 0.03) == pytest.approx(0.8, abs=0.005)
    assert noninferiority_power([], 0.5) == 0.0
    assert math.isclose(noninferiority_power([0.0] * 10**6, 0.05), 1.0)
