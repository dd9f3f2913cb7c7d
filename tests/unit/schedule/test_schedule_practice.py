import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from burnish.schedule.values.base import NUM_BANDS, band_of
from burnish.schedule.values.practice import PracticeCurves


def add(curves, rates_DK, rollouts=16.0):
    """One step in which every band passes exactly at its rate."""
    rates = np.array(rates_DK)
    scored = np.full(rates.shape, rollouts)
    curves.add(scored, scored * rates, np.full(len(rates), 16.0))


def logistic(x):
    return 1.0 / (1.0 + math.exp(-x))


def trained(speeds, num_steps=60, bands=((0.0,),)):
    """Domains whose log odds grow at `speeds` with the logarithm of their depth."""
    curves = PracticeCurves(len(speeds), len(bands[0]))
    for _ in range(num_steps):
        depth = curves.depth()
        add(
            curves,
            [
                [logistic(b + s * math.log(d / depth_at_start(len(speeds)))) for b in bands[0]]
                for s, d in zip(speeds, depth, strict=True)
            ],
            rollouts=64.0,
        )
    return curves


def depth_at_start(num):
    return float(PracticeCurves(num, 1).depth()[0])


def test_speeds_are_those_of_the_log_odds():
    found = trained([0.4, 0.2, 0.0]).speeds()
    assert np.allclose(found.mean_D, [0.4, 0.2, 0.0], atol=0.1)
    assert (found.sd_D < 0.5).all()


def test_a_domain_that_was_never_seen_is_expected_to_move():
    curves = PracticeCurves(2, 1)
    unknown = curves.speeds()
    assert (unknown.mean_D > 0.4).all()
    assert (unknown.sd_D > 0.5).all()


def test_practising_a_harder_band_is_not_getting_worse():
    curves = PracticeCurves(1, 2)
    for step in range(40):
        hard = step >= 20
        scored = np.array([[0.0, 32.0]]) if hard else np.array([[32.0, 0.0]])
        curves.add(scored, scored * (0.2 if hard else 0.8), np.array([16.0]))
    assert curves.speeds().mean_D[0] > -0.1
    assert curves.depth()[0] > 40 * 16.0


def test_reach_is_what_lies_between_the_best_band_and_the_others():
    curves = PracticeCurves(4, 3)
    for _ in range(10):
        add(curves, [[0.9, 0.5, 0.1], [0.9, 0.9, 0.9], [0.5, 0.5, 0.5], [0.0, 0.0, 0.0]], 64.0)
    reach = curves.reach()
    assert np.allclose(reach[0] - reach[1:], 0.5 * (0.9 - 0.5), atol=0.01)


def test_a_single_band_reaches_furthest_at_one_half():
    curves = PracticeCurves(3, 4)
    for _ in range(10):
        scored = np.zeros((3, 4))
        scored[:, 0] = 32.0
        curves.add(scored, scored * np.array([[0.02], [0.5], [0.98]]), np.full(3, 8.0))
    reach = curves.reach()
    assert reach[1] > 5.0 * max(reach[0], reach[2])


def test_a_fall_begins_the_line_anew_and_noise_does_not():
    rng = np.random.default_rng(0)
    curves = PracticeCurves(2, 1)
    for step in range(200):
        scored = np.full((2, 1), 16.0)
        rate = np.array([[0.7 if step < 150 else 0.3], [0.7]])
        curves.add(scored, rng.binomial(16, rate).astype(np.float64), np.full(2, 10.0))
    fallen, steady = curves.depth()
    assert fallen < 0.5 * steady
    assert steady > 200 * 10.0
    assert curves.rates()[0, 0] == pytest.approx(0.3, abs=0.1)


def test_groups_that_pass_or_fail_whole_count_as_less_evidence():
    rng = np.random.default_rng(1)
    single, whole = PracticeCurves(1, 1), PracticeCurves(1, 1)
    for _ in range(200):
        scored = np.full((1, 1), 16.0)
        single.add(scored, rng.binomial(16, 0.5, (1, 1)).astype(np.float64), np.array([10.0]))
        whole.add(scored, 16.0 * rng.binomial(1, 0.5, (1, 1)), np.array([10.0]))
    assert whole.speeds().sd_D[0] > 1.5 * single.speeds().sd_D[0]


def test_curves_continue_bit_for_bit_and_rows_move_up():
    curves = trained([1.0, 0.3, 0.0])
    again = PracticeCurves(3, 1)
    again.load(json.loads(json.dumps(curves.state())))
    for c in (curves, again):
        c.remove_row(0)
        c.add_row()
        add(c, [[0.5], [0.2], [0.9]])
    assert again.state() == curves.state()
    assert again.speeds().mean_D.tolist() == curves.speeds().mean_D.tolist()


def test_tiers_share_the_bands_in_order():
    for num_tiers in range(1, 40):
        bands = [band_of(tier, num_tiers) for tier in range(num_tiers)]
        assert bands == sorted(bands)
        assert set(bands) == set(range(min(num_tiers, NUM_BANDS)))


counts = st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 10_000), st.floats(0, 1))


@settings(max_examples=60, deadline=None)
@given(st.lists(counts, max_size=40))
def test_whatever_comes_speeds_reach_and_depth_are_numbers(seen):
    curves = PracticeCurves(4, 4)
    for row, band, num, rate in seen:
        scored = np.zeros((4, 4))
        scored[row, band] = num
        curves.add(scored, scored * rate, scored.sum(axis=1) * rate)
        speeds = curves.speeds()
        for array in (speeds.mean_D, speeds.sd_D, curves.reach(), curves.depth()):
            assert np.isfinite(array).all()
        assert (speeds.sd_D >= 0.0).all()
        assert (curves.reach() > 0.0).all()
        assert (curves.depth() > 0.0).all()
