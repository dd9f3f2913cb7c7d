import json
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from burnish.schedule.curriculum.easy_pool import EasyPool
from burnish.schedule.curriculum.group_size import group_sizes, group_value
from burnish.schedule.curriculum.sampler import oversampled
from burnish.schedule.curriculum.tiers import Tiers

rates = st.lists(st.floats(0, 1), min_size=1, max_size=4)


@settings(max_examples=60, deadline=None)
@given(rates, st.integers(0, 14))
def test_group_sizes_are_as_good_as_the_best_of_all_ways_to_share(pass_rates, extra):
    total = 2 * len(pass_rates) + extra
    sizes = group_sizes(pass_rates, total, least=2, most=8)
    ways = product(range(2, 9), repeat=len(pass_rates))
    fitting = [w for w in ways if sum(w) == min(total, 8 * len(pass_rates))]
    assert tuple(sizes) in fitting

    def worth(way):
        return sum(group_value(n, p) for n, p in zip(way, pass_rates, strict=True))

    assert worth(sizes) >= max(map(worth, fitting)) - 1e-12


def fed(tiers, rate_by_tier, num_steps, rng, group=16):
    for _ in range(num_steps):
        done = np.full((1, len(rate_by_tier)), float(group))
        tiers.observe(done, rng.binomial(group, rate_by_tier)[None].astype(float))
    return tiers


def test_the_ladder_opens_what_is_in_reach_and_closes_what_is_hopeless():
    rng = np.random.default_rng(0)
    tiers = fed(Tiers(1, 3), [0.95, 0.5, 0.02], 40, rng)
    assert tiers.level_D[0] == 1
    fed(tiers, [0.95, 0.9, 0.4], 60, rng)
    assert tiers.level_D[0] == 2
    fed(tiers, [0.95, 0.9, 0.02], 80, rng)
    assert tiers.level_D[0] == 1


def test_the_ladder_stands_still_between_its_thresholds():
    rng = np.random.default_rng(1)
    tiers = fed(Tiers(1, 3), [0.95, 0.45, 0.1], 40, rng)
    levels = set()
    for _ in range(200):
        levels.add(float(fed(tiers, [0.95, 0.45, 0.1], 1, rng).level_D[0]))
    assert levels == {1.0}


def test_the_tier_nearest_to_one_half_is_chosen_most_and_closed_ones_never():
    rng = np.random.default_rng(2)
    tiers = fed(Tiers(1, 4), [0.95, 0.5, 0.05, 0.0], 40, rng)
    chosen = [int(tiers.choose(rng)[0]) for _ in range(300)]
    assert chosen.count(1) > 280
    assert max(chosen) <= tiers.level_D[0]


def test_tiers_continue_bit_for_bit():
    rng = np.random.default_rng(3)
    tiers = fed(Tiers(1, 3), [0.9, 0.4, 0.1], 20, rng)
    again = Tiers(1, 3)
    again.load(json.loads(json.dumps(tiers.state())))
    one, other = np.random.default_rng(4), np.random.default_rng(4)
    assert [tiers.choose(one)[0] for _ in range(50)] == [again.choose(other)[0] for _ in range(50)]


def test_a_tenth_of_the_groups_rehearses_and_what_is_forgotten_leaves_the_pool():
    pool = EasyPool(share=0.1)
    for item in range(5):
        pool.judged(item, 1.0)
    pool.judged(5, 0.8)
    seen = []
    for _ in range(100):
        item = pool.next()
        if item is not None:
            seen.append(item)
            pool.judged(item, 0.2 if item == 3 else 0.8, rehearsed=True)
    assert len(seen) in (9, 10)
    assert seen.count(3) == 1
    assert 5 not in seen
    assert len(pool) == 4


def test_an_easy_pool_continues_where_it_was_and_forgets_its_oldest_when_full():
    pool = EasyPool(share=0.5, capacity=3)
    for item in range(6):
        pool.judged(item, 1.0)
    again = EasyPool(share=0.5, capacity=3)
    again.load(json.loads(json.dumps(pool.state())))
    assert [pool.next() for _ in range(8)] == [again.next() for _ in range(8)]
    assert pool.state() == again.state()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(0.2, 1.0), min_size=2, max_size=6), st.integers(100, 5000))
def test_what_survives_the_filter_has_the_ratios_that_were_asked_for(acceptance, num_groups):
    counts = oversampled([1.0] * len(acceptance), acceptance, num_groups)
    assert sum(counts) == num_groups
    kept = [n * a for n, a in zip(counts, acceptance, strict=True)]
    assert max(kept) - min(kept) <= 2.0


@pytest.mark.parametrize("acceptance", [0.0, 0.01])
def test_a_domain_that_passes_nothing_is_not_oversampled_without_end(acceptance):
    assert oversampled([1.0, 1.0], [acceptance, 1.0], 600) == [500, 100]
