import json
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from burnish.core.errors import UserError
from burnish.plan.learning.ratio_check import ratio_error
from burnish.plan.learning.starvation import drive_randomly
from burnish.schedule.domains import DomainScheduler
from burnish.schedule.picks import DomainScheduleConfig, DomainShare
from burnish.schedule.values.dealer import Dealer
from burnish.schedule.values.names import PolicyName

NAMES = [f"d{i}" for i in range(6)]
EVERY = list(PolicyName)


def use(scheduler, num_picks, rng, start=0):
    """Picks, observations, settlements, audits, arrivals and departures."""
    picks = []
    for i in range(start, start + num_picks):
        pick = scheduler.next(blocked={rng.choice(NAMES)} if rng.random() < 0.1 else ())
        picks.append(pick)
        if pick is None:
            continue
        rate = rng.random()
        scheduler.observe(
            pick.domain,
            pass_rate=rate,
            mean_score=rate,
            num_rollouts=rng.choice((0, 8)),
            cost_tokens=rng.lognormvariate(4, 2),
            step=i // 5,
        )
        scheduler.settle(pick.domain, rng.choice((0.0, 300.0)))
        if rng.random() < 0.05:
            scheduler.audited(pick.domain, rng.random())
        if rng.random() < 0.03:
            scheduler.add(f"n{i}", DomainShare(weight=2.0))
        if rng.random() < 0.03 and len(scheduler.active()) > 2:
            scheduler.remove(rng.choice(scheduler.active()))
        if rng.random() < 0.03:
            share = DomainShare(weight=rng.choice((0.5, 3.0)))
            scheduler.declare(rng.choice(scheduler.active()), share)
    return picks


@pytest.mark.parametrize("policy", EVERY)
def test_a_killed_scheduler_continues_bit_for_bit_under_every_policy(policy):
    config = DomainScheduleConfig(policy=policy, warmup_picks=1)
    whole, rng = DomainScheduler(NAMES, config), random.Random(3)
    first = use(whole, 120, rng)
    saved, at = json.dumps(whole.state()), rng.getstate()
    rest = use(whole, 120, rng, 120)
    again = DomainScheduler.from_state(json.loads(saved), config)
    rng.setstate(at)
    assert use(again, 120, rng, 120) == rest
    assert again.state() == whole.state()
    assert again.table() == whole.table()
    assert len(first) == 120


@pytest.mark.parametrize("policy", EVERY)
def test_shares_sum_to_one_and_every_domain_has_a_reason(policy):
    scheduler = DomainScheduler(NAMES, DomainScheduleConfig(policy=policy))
    use(scheduler, 200, random.Random(1))
    assert math.isclose(sum(row.share for row in scheduler.table()), 1.0, rel_tol=1e-9)
    for name in scheduler.active():
        why = scheduler.explain(name)
        assert why.policy == policy
        assert f"waits at most {scheduler.max_gap(name)} groups" in why.text


def test_no_domain_ever_waits_beyond_its_own_bound():
    assert drive_randomly(10_000, seed=5) == 0


@pytest.mark.slow
def test_no_domain_ever_waits_beyond_its_own_bound_in_100_000_steps():
    assert drive_randomly(100_000, seed=7) == 0


def test_a_dealer_without_its_guard_is_found_out(monkeypatch):
    monkeypatch.setattr(Dealer, "overdue", lambda *args: None)
    assert drive_randomly(10_000, seed=5) > 0


@pytest.mark.parametrize("seed", [0, 1])
def test_static_ratios_hold_on_trained_tokens_despite_filters_and_failures(seed):
    assert ratio_error(seed) <= 0.02


def test_an_audited_domain_loses_share_and_says_why():
    scheduler = DomainScheduler(NAMES[:2], DomainScheduleConfig())
    for step in range(40):
        if step == 20:
            scheduler.audited("d0", 0.9)
        for name in NAMES[:2]:
            scheduler.observe(
                name, pass_rate=0.5, mean_score=0.5, num_rollouts=8, cost_tokens=10, step=step
            )
    share = {row.domain: row.share for row in scheduler.table()}
    assert share["d0"] < 0.2 < share["d1"]
    assert "90% of passes undeserved" in scheduler.explain("d0").text


def test_full_fairness_serves_those_that_fail_more_and_have_practised_less():
    scheduler = DomainScheduler(NAMES[:3], DomainScheduleConfig(fairness=1.0))
    # Whoever is dear or gains nothing is served like the others.
    for step in range(60):
        for name, rate, often in (("d0", 0.75, 1), ("d1", 0.25, 1), ("d2", 0.25, 4)):
            if step % often == 0:
                scheduler.observe(
                    name,
                    pass_rate=rate,
                    mean_score=rate,
                    num_rollouts=8,
                    cost_tokens=10.0 * often,
                    step=step,
                )
    share = {row.domain: row.share for row in scheduler.table()}
    assert 1.5 * share["d0"] < share["d1"]
    assert 1.5 * share["d1"] < share["d2"]


def test_failed_groups_make_a_domain_dear_and_teach_nothing():
    scheduler = DomainScheduler(NAMES[:2], DomainScheduleConfig())
    for step in range(30):
        # Both practise the same; one pays for four times as many groups.
        for name, scored in (("d0", 8), ("d1", 8), ("d1", 0), ("d1", 0), ("d1", 0)):
            scheduler.observe(
                name, pass_rate=0.5, mean_score=0.5, num_rollouts=scored, cost_tokens=80, step=step
            )
    row = {r.domain: r for r in scheduler.table()}
    assert row["d1"].cost_per_rollout > 3 * row["d0"].cost_per_rollout
    assert row["d1"].pass_rate == 0.5
    assert row["d1"].share < row["d0"].share


def test_a_share_that_cannot_be_met_is_refused_and_changes_nothing():
    scheduler = DomainScheduler(NAMES[:2], DomainScheduleConfig())
    scheduler.declare("d0", DomainShare(min_share=0.7))
    before = scheduler.state()
    with pytest.raises(UserError, match="min_share"):
        scheduler.declare("d1", DomainShare(min_share=0.7))
    with pytest.raises(UserError, match="min_share"):
        scheduler.add("d2", DomainShare(min_share=0.7))
    assert scheduler.state() == before


@pytest.mark.parametrize("policy", EVERY)
def test_a_domain_comes_back_after_all_the_others_have_left(policy):
    scheduler = DomainScheduler(NAMES[:2], DomainScheduleConfig(policy=policy, warmup_picks=0))
    scheduler.quarantine("d0", "drawn")
    scheduler.remove("d1")
    assert scheduler.next() is None
    scheduler.restore("d0")
    assert [scheduler.next().domain for _ in range(3)] == ["d0"] * 3
    scheduler.observe("d0", pass_rate=0.5, mean_score=0.5, num_rollouts=8, cost_tokens=9.0, step=3)
    assert scheduler.table()[0].share == 1.0


def test_groups_of_a_removed_domain_that_come_back_are_ignored():
    scheduler = DomainScheduler(NAMES[:2], DomainScheduleConfig())
    scheduler.remove("d0")
    scheduler.settle("d0", 100.0)
    scheduler.observe("d0", pass_rate=1.0, mean_score=1.0, num_rollouts=8, cost_tokens=1.0, step=0)
    assert scheduler.next().domain == "d1"


@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from(EVERY),
    st.lists(st.tuples(st.integers(0, 5), st.floats(0, 1), st.floats(0, 1e12)), max_size=60),
)
def test_no_observation_makes_shares_that_are_not_numbers(policy, seen):
    scheduler = DomainScheduler(NAMES, DomainScheduleConfig(policy=policy))
    for step, (i, rate, cost) in enumerate(seen):
        scheduler.observe(
            NAMES[i], pass_rate=rate, mean_score=rate, num_rollouts=8, cost_tokens=cost, step=step
        )
        scheduler.settle(NAMES[i], cost)
        assert scheduler.next() is not None
    assert all(math.isfinite(row.share) and row.share >= 0.0 for row in scheduler.table())
