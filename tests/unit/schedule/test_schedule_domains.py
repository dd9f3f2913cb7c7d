import json
import math
import random

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from burnish.core.errors import UserError
from burnish.schedule.domains import DomainScheduler
from burnish.schedule.picks import CostUnit, DomainScheduleConfig, DomainShare, PickReason
from burnish.schedule.wishes import check_live, check_schedule, check_wishes

NAMES = [f"d{i}" for i in range(8)]


def make(n=4, **config):
    return DomainScheduler(NAMES[:n], DomainScheduleConfig(**config))


def drive(scheduler, world, num_picks, rng, groups_per_step=8):
    """Dispatch and observe in turn; `world(domain, rollouts so far)` is (pass rate, cost)."""
    seen = dict.fromkeys(NAMES, 0)
    picks = []
    for i in range(num_picks):
        pick = scheduler.next()
        p, cost = world(pick.domain, seen[pick.domain])
        seen[pick.domain] += 8
        rate = sum(rng.random() < p for _ in range(8)) / 8
        scheduler.observe(
            pick.domain,
            pass_rate=rate,
            mean_score=rate,
            num_rollouts=8,
            cost_tokens=8 * cost,
            step=i // groups_per_step,
        )
        picks.append(pick)
    return picks


operations = st.lists(
    st.one_of(
        st.tuples(st.just("pick"), st.sets(st.integers(0, 7), max_size=3)),
        st.tuples(st.just("quarantine"), st.integers(0, 7)),
        st.tuples(st.just("restore"), st.integers(0, 7)),
        st.tuples(
            st.just("observe"),
            st.integers(0, 7),
            st.floats(0, 1),
            st.floats(0, 1e6),
            st.integers(1, 32),
        ),
    ),
    min_size=1,
    max_size=400,
)


def apply(scheduler, n, operation, step):
    kind, *arguments = operation
    if kind == "pick":
        return scheduler.next(blocked={NAMES[i] for i in arguments[0]})
    domain = NAMES[arguments[0] % n]
    if kind == "quarantine":
        scheduler.quarantine(domain, "test")
    elif kind == "restore":
        scheduler.restore(domain)
    else:
        _, rate, cost, num = arguments
        scheduler.observe(
            domain, pass_rate=rate, mean_score=rate, num_rollouts=num, cost_tokens=cost, step=step
        )
    return None


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 8), st.sampled_from([0.05, 0.15, 0.5, 1.0]), operations)
def test_no_eligible_domain_waits_beyond_the_bound(n, floor, ops):
    scheduler = make(n, floor=floor)
    waits = dict.fromkeys(NAMES[:n], 0)
    # Long stretches of picks between the random events, so that the bound is really approached.
    stretch = 3 * scheduler.max_gap() // max(len(ops), 1) + 1
    for step, op in enumerate(ops):
        for _ in range(stretch if op[0] == "pick" else 1):
            blocked = {NAMES[i] for i in op[1]} if op[0] == "pick" else set()
            eligible = [d for d in scheduler.active() if d not in blocked]
            pick = apply(scheduler, n, op, step)
            if op[0] == "restore":
                waits[NAMES[op[1] % n]] = 0
            if op[0] != "pick":
                continue
            assert (pick is None) == (not eligible)
            for d in eligible:
                waits[d] = 0 if d == pick.domain else waits[d] + 1
                assert waits[d] <= scheduler.max_gap()


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 8), operations, st.data())
def test_a_saved_and_restored_scheduler_continues_with_the_same_decisions(n, ops, data):
    cut = data.draw(st.integers(0, len(ops)))
    config = DomainScheduleConfig(warmup_picks=1)
    whole = DomainScheduler(NAMES[:n], config)
    expected = [apply(whole, n, op, i) for i, op in enumerate(ops)]
    first = DomainScheduler(NAMES[:n], config)
    got = [apply(first, n, op, i) for i, op in enumerate(ops[:cut])]
    second = DomainScheduler.from_state(json.loads(json.dumps(first.state())), config)
    got += [apply(second, n, op, i + cut) for i, op in enumerate(ops[cut:])]
    assert got == expected
    assert second.state() == whole.state()
    assert second.table() == whole.table()


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 8), operations)
def test_indices_are_sequential_per_domain_and_quarantine_holds_at_once(n, ops):
    scheduler = make(n)
    expected = dict.fromkeys(NAMES, 0)
    for step, op in enumerate(ops):
        active = scheduler.active()
        pick = apply(scheduler, n, op, step)
        if pick is not None:
            assert pick.domain in active
            assert pick.index == expected[pick.domain]
            expected[pick.domain] += 1


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(0, 1e9), min_size=2, max_size=8), st.floats(1e-3, 1e3))
def test_shares_always_sum_to_one_and_stay_within_their_bounds(costs, scale):
    n = len(costs)
    bounds = {NAMES[0]: DomainShare(min_share=0.3), NAMES[1]: DomainShare(max_share=0.6)}
    scheduler = make(n, domains=bounds)
    for i, cost in enumerate(costs):
        scheduler.observe(
            NAMES[i],
            pass_rate=0.5,
            mean_score=0.5,
            num_rollouts=8,
            cost_tokens=cost * scale,
            step=i,
        )
    shares = {row.domain: row.share for row in scheduler.table()}
    assert math.isclose(sum(shares.values()), 1.0, rel_tol=1e-9)
    assert shares[NAMES[0]] >= 0.3 - 1e-9
    assert shares[NAMES[1]] <= 0.6 + 1e-9
    assert min(shares.values()) >= DomainScheduleConfig().floor / n - 1e-9


def test_saturated_and_hopeless_domains_fall_to_the_floor_and_no_lower():
    world = {"d0": 1.0, "d1": 0.0, "d2": 0.5, "d3": 0.4}
    scheduler = make(4, floor=0.15)
    picks = drive(scheduler, lambda d, _: (world[d], 100.0), 800, random.Random(0))
    share = {row.domain: row.share for row in scheduler.table()}
    floor = 0.15 / 4
    for dead in ("d0", "d1"):
        assert floor <= share[dead] <= floor + 0.02
        late = sum(p.domain == dead for p in picks[400:]) / 400
        assert 0.5 * floor <= late <= 2.0 * floor


def test_a_learning_domain_earns_more_than_an_equally_noisy_one_that_stands_still():
    def world(domain, seen):
        return (min(0.2 + seen / 8000, 0.8) if domain == "d0" else 0.5, 100.0)

    scheduler = make(4)
    drive(scheduler, world, 1200, random.Random(1))
    share = {row.domain: row.share for row in scheduler.table()}
    assert share["d0"] > 1.5 * max(share[d] for d in ("d1", "d2", "d3"))


def test_equal_progress_at_ten_times_the_cost_gets_fewer_groups():
    scheduler = make(2)
    picks = drive(
        scheduler, lambda d, _: (0.5, 1000.0 if d == "d0" else 100.0), 600, random.Random(2)
    )
    assert sum(p.domain == "d1" for p in picks) > 5 * sum(p.domain == "d0" for p in picks)


def test_a_domain_a_million_times_dearer_is_still_served_within_the_bound():
    scheduler = make(4)
    picks = drive(
        scheduler, lambda d, _: (0.5, 1e8 if d == "d0" else 100.0), 1000, random.Random(5)
    )
    at = [i for i, p in enumerate(picks) if p.domain == "d0"]
    gaps = [b - a for a, b in zip([*at], [*at[1:], len(picks)], strict=True)]
    assert max(gaps) <= scheduler.max_gap() + 1
    assert max(gaps) > scheduler.max_gap() // 2


def test_realised_cost_follows_the_shares_when_costs_differ():
    shares = {
        "d0": DomainShare(min_share=0.5, max_share=0.5),
        "d1": DomainShare(min_share=0.3, max_share=0.3),
        "d2": DomainShare(min_share=0.2, max_share=0.2),
    }
    scheduler = make(3, domains=shares, warmup_picks=1)
    costs = {"d0": 50.0, "d1": 200.0, "d2": 100.0}
    drive(scheduler, lambda d, _: (0.5, costs[d]), 2000, random.Random(3))
    ratios = {row.domain: row.cost_ratio for row in scheduler.table()}
    for domain, wish in shares.items():
        assert abs(ratios[domain] - wish.min_share) < 0.01


def test_partial_credit_keeps_a_domain_without_passes_alive():
    scheduler = make(2)
    for step in range(60):
        for domain, std in (("d0", 0.25), ("d1", 0.0)):
            scheduler.observe(
                domain,
                pass_rate=0.0,
                mean_score=0.3,
                num_rollouts=8,
                cost_tokens=800,
                score_std=std,
                step=step,
            )
    share = {row.domain: row.share for row in scheduler.table()}
    assert share["d0"] > 4 * share["d1"]


def test_warm_up_serves_every_domain_first():
    scheduler = make(5, warmup_picks=2)
    picks = [scheduler.next() for _ in range(10)]
    assert [p.reason for p in picks] == [PickReason.WARMUP] * 10
    assert [p.domain for p in picks] == NAMES[:5] * 2


def test_floor_share_of_picks_matches_its_configuration_at_equal_cost():
    scheduler = make(4, floor=0.15, warmup_picks=0)
    picks = drive(scheduler, lambda d, _: (0.5, 100.0), 1000, random.Random(4))
    assert abs(sum(p.reason is PickReason.FLOOR for p in picks) - 150) <= 2


def test_quarantine_and_blocking_of_everything_gives_no_pick():
    scheduler = make(2)
    scheduler.quarantine("d0", "oracle fails")
    assert scheduler.next(blocked={"d1"}) is None
    assert scheduler.table()[0].quarantined == "oracle fails"
    assert scheduler.table()[0].share == 0.0
    scheduler.restore("d0")
    assert scheduler.next(blocked={"d1"}).domain == "d0"


def test_seconds_and_tokens_are_not_mixed_up():
    scheduler = make(2, cost_unit=CostUnit.SECONDS)
    scheduler.observe(
        "d0", pass_rate=0.5, mean_score=0.5, num_rollouts=4, cost_s=2.0, cost_tokens=999, step=0
    )
    assert scheduler.table()[0].cost_per_rollout == 0.5


@pytest.mark.parametrize(
    ("domains", "config", "text"),
    [
        ([], {}, "No domain"),
        (["a"], {"domains": {"b": {}}}, "'b'"),
        (["a", "b"], {"domains": {"a": {"min_share": 0.7}, "b": {"min_share": 0.7}}}, "min_share"),
        (["a", "b"], {"domains": {"a": {"min_share": 1.0}}}, "sum to 1.* floors of the others"),
        (["a", "b"], {"floor": 0.2, "domains": {"a": {"min_share": 0.95}}}, "floors of the others"),
        (["a", "b"], {"domains": {"a": {"max_share": 0.2}, "b": {"max_share": 0.2}}}, "max_share"),
        (["a", "b"], {"domains": {"a": {"max_share": 0.01}}}, "floor"),
    ],
)
def test_impossible_wishes_are_refused_with_a_fix(domains, config, text):
    with pytest.raises(UserError, match=text) as caught:
        DomainScheduler(domains, DomainScheduleConfig.model_validate(config))
    assert caught.value.fix
    with pytest.raises(UserError) as early:
        check_schedule(domains, DomainScheduleConfig.model_validate(config))
    assert str(early.value) == str(caught.value)


def test_possible_wishes_pass_the_check_of_a_dry_run():
    check_schedule(["a", "b"], DomainScheduleConfig(domains={"a": DomainShare(min_share=0.7)}))


@given(
    wanted=st.lists(st.floats(0.0, 1.0), min_size=1, max_size=6),
    floor=st.floats(0.01, 1.0),
    weight=st.floats(0.1, 10.0),
)
def test_least_shares_are_taken_exactly_if_floors_leave_room_for_them(wanted, floor, weight):
    wishes = {f"d{i}": DomainShare(min_share=w) for i, w in enumerate(wanted)}
    wishes["d0"] = DomainShare(min_share=wanted[0], weight=weight)
    total = weight + len(wanted) - 1
    floors = [floor * w.weight / total for w in wishes.values()]
    needed = sum(max(w, low) for w, low in zip(wanted, floors, strict=True))
    assume(abs(needed - 1.0) > 1e-6)
    if needed < 1.0:
        check_wishes(wishes, floor)
    else:
        with pytest.raises(UserError, match="min_share"):
            check_wishes(wishes, floor)


def test_the_last_domain_may_have_all():
    check_schedule(["a"], DomainScheduleConfig(domains={"a": DomainShare(min_share=1.0)}))


def test_a_state_of_another_version_is_refused():
    state = {**make().state(), "version": 99}
    with pytest.raises(UserError, match="99"):
        DomainScheduler.from_state(state, DomainScheduleConfig())


@pytest.mark.parametrize(
    ("settings", "deterministic", "named"),
    [
        ({"policy": "tac"}, False, "tac"),
        ({"cost_unit": "seconds"}, True, "cost_unit"),
        ({"cost_unit": "dominant"}, True, "cost_unit"),
        ({"cost_unit": "seconds"}, False, None),
        ({}, True, None),
    ],
)
def test_what_a_run_cannot_do_is_refused_before_it_begins(settings, deterministic, named):
    config = DomainScheduleConfig(**settings)
    if named is None:
        check_live(config, deterministic=deterministic)
    else:
        with pytest.raises(UserError, match=named):
            check_live(config, deterministic=deterministic)


def test_a_rehearsal_costs_but_says_nothing_about_progress():
    plain, rehearsing = make(2), make(2)
    for scheduler, rehearsed in ((plain, False), (rehearsing, True)):
        for step in range(4):
            scheduler.observe(
                "d0",
                pass_rate=1.0,
                mean_score=1.0,
                num_rollouts=8,
                cost_tokens=10.0,
                step=step,
                rehearsed=rehearsed,
            )
    assert plain.table()[0].pass_rate == 1.0
    assert rehearsing.table()[0].pass_rate is None
    assert plain.table()[0].cost_ratio == rehearsing.table()[0].cost_ratio == 1.0
