import json
import math
from itertools import product

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from burnish.schedule.curriculum.config import CurriculumConfig
from burnish.schedule.curriculum.curriculum import Curriculum
from burnish.schedule.curriculum.easy_pool import EasyPool
from burnish.schedule.curriculum.group_size import GroupSizes, group_sizes, group_value
from burnish.schedule.curriculum.items import Items
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
@given(
    st.lists(st.floats(0, 1) | st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=1, max_size=40),
    st.sampled_from([1.5, 2.0, 4.0]),
)
def test_a_group_sized_by_itself_has_its_part_of_the_windows_knapsack(pass_rates, ratio):
    sizes, over, window = GroupSizes(8, ratio, window=8), 0, []
    for rate in pass_rates:
        window = [*window[-7:], rate]
        least, most = max(2, math.ceil(8 / ratio)), max(int(8 * ratio), 8)
        beside = group_sizes(window, max(8 * len(window) - over, 0), least=least, most=most)
        size = sizes.next(rate)
        assert size == beside[-1]
        over += size - 8


@given(st.lists(st.floats(0, 1), min_size=40, max_size=120), st.sampled_from([1.5, 2.0, 4.0]))
def test_groups_sized_one_by_one_keep_their_mean_and_bounds(pass_rates, ratio):
    sizes = GroupSizes(8, ratio, window=8)
    got = [sizes.next(rate) for rate in pass_rates]
    assert all(8 / ratio <= size <= 8 * ratio for size in got)
    # A window's worth of samples may be ahead or behind at any time, never more.
    for n in range(1, len(got) + 1):
        assert abs(sum(got[:n]) - 8 * n) <= 8 * 8


def test_samples_go_where_they_are_likely_to_differ_and_without_a_ratio_nowhere():
    sizes = GroupSizes(8, 2.0, window=8)
    got = [(rate, sizes.next(rate)) for _ in range(20) for rate in (0.4, 0.99)]
    late = got[20:]
    assert min(size for rate, size in late if rate == 0.4) > 8
    assert max(size for rate, size in late if rate == 0.99) < 8
    assert [GroupSizes(8, 1.0, window=8).next(rate) for rate in (0.0, 0.4)] == [8, 8]


@given(st.lists(st.integers(0, 2), min_size=1, max_size=200))
def test_every_item_is_handed_out_once_and_in_order_within_its_tier(tiers):
    items = Items(5, 3, lambda item: item % 3)
    taken = [items.take(tier) for tier in tiers]
    assert [tier for _, tier in taken] == tiers
    assert all(item % 3 == tier for item, tier in taken)
    assert len({item for item, _ in taken}) == len(taken)
    for tier in range(3):
        own = [item for item, t in taken if t == tier]
        assert own == list(range(5, 5 + 3 * 200))[(tier - 5) % 3 :: 3][: len(own)]


def test_a_tier_that_does_not_come_up_is_replaced_by_the_nearest_easier_one():
    items = Items(0, 3, lambda item: item % 2)
    assert items.take(2)[1] == 1
    again = Items(0, 3, lambda item: item % 2)
    again.load(json.loads(json.dumps(items.state())))
    assert again.take(0) == items.take(0)


def curriculum(**config):
    made = Curriculum(CurriculumConfig(**config), group_size=8, window=4, seed=3, first_item=2)
    made.add("tiered", 3, lambda item: item % 3)
    made.add("plain", 1, lambda item: 1 // 0)
    return made


def play(made, num_choices, rates=(0.9, 0.5, 0.05)):
    seen = []
    rng = np.random.default_rng(0)
    for _ in range(num_choices):
        choice = made.choose("tiered")
        made.judged("tiered", choice, choice.size, rng.binomial(choice.size, rates[choice.tier]))
        seen.append(choice)
    return seen


def test_a_domain_with_tiers_settles_on_the_one_that_teaches_most():
    made = curriculum(easy_share=0.0)
    assert made.text("tiered").endswith("pass -, -, -"), "nothing was tried yet"
    seen = play(made, 200)
    assert seen[0].tier == 0
    assert sum(c.tier == 1 for c in seen[100:]) > 85
    assert {made.band("tiered", c) for c in seen} >= {0, 1}
    assert made.band("plain", made.choose("plain")) == 0
    assert "2 of 3 tiers open" in made.text("tiered")


def test_a_domain_without_tiers_takes_its_items_as_they_come():
    made = curriculum(easy_share=0.0)
    assert [made.choose("plain").item for _ in range(4)] == [2, 3, 4, 5]
    assert made.text("plain") == "items as they come"


def test_mastered_items_come_back_under_a_name_of_their_own_and_teach_no_tier():
    made = curriculum(easy_share=0.25)
    seen = play(made, 100, rates=(1.0, 1.0, 1.0))
    visits = [c.visit for c in seen if c.visit]
    assert visits == list(range(1, len(visits) + 1))
    assert 20 <= len(visits) <= 25
    before = made.state()["domains"]["tiered"]["tiers"]
    rehearsal = next(c for c in iter(lambda: made.choose("tiered"), None) if c.visit)
    made.judged("tiered", rehearsal, 8, 0)
    assert made.state()["domains"]["tiered"]["tiers"] == before


def test_a_rehearsal_that_was_cancelled_or_failed_is_still_due():
    made = curriculum(easy_share=0.5)
    play(made, 2, rates=(1.0, 1.0, 1.0))
    pool = made.text("tiered")
    choice = next(c for c in iter(lambda: made.choose("tiered"), None) if c.visit)
    made.cancelled("tiered", choice)
    assert made.text("tiered").split(" items")[0] == pool.split(" items")[0]
    again = next(c for c in iter(lambda: made.choose("tiered"), None) if c.visit)
    made.judged("tiered", again, 0, 0)
    assert made.text("tiered").split(" items")[0] == pool.split(" items")[0]


def test_a_curriculum_continues_bit_for_bit():
    made = curriculum(easy_share=0.2, size_ratio=2.0)
    play(made, 50)
    again = curriculum(easy_share=0.2, size_ratio=2.0)
    again.load(json.loads(json.dumps(made.state())))
    assert play(made, 50) == play(again, 50)
    assert made.state() == again.state()
