import json
import math

import numpy as np
import pytest

from burnish.core.errors import UserError
from burnish.plan.comparison import compare, interval, record
from burnish.plan.learning.families import FAMILIES, POLICIES, SIZED, UNTIERED, scheduler_for
from burnish.plan.learning.world import GROUP_SIZE, NUM_TIERS, Family, Size, World
from burnish.plan.picture import draw
from burnish.plan.registry import scenario, scenarios
from burnish.plan.scenario import Tier

SMALL = Size(20, 30, 16.0, 8)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_policy_spends_the_budget_and_keeps_skills_finite(family):
    for policy in POLICIES:
        world = World(FAMILIES[family][1], SMALL, 0)
        scheduler, rng = scheduler_for(policy, world), np.random.default_rng(0)
        spent = 0.0
        for _ in range(SMALL.num_steps):
            rollouts = scheduler.plan(320.0, world.active(), rng)
            result = world.step(rollouts, scheduler.size_D)
            scheduler.observe(result)
            spent += result.cost_D.sum()
        assert np.isfinite(world.skill).all()
        assert 0.0 <= world.score() <= 1.0
        assert spent > 0.2 * 320.0 * SMALL.num_steps


def test_equal_seeds_give_equal_trials():
    one, other = (scenario("traps").run("value", Tier.S, 3) for _ in range(2))
    assert json.dumps(one.metrics) == json.dumps(other.metrics)
    assert one.curves == other.curves


@pytest.mark.parametrize("policy", ["value", SIZED])
def test_a_simulated_scheduler_resumes_bit_for_bit(policy):
    def scores(cut):
        world = World(FAMILIES["traps"][1], SMALL, 5)
        scheduler, rng = scheduler_for(policy, world), np.random.default_rng(1)
        for step in range(SMALL.num_steps):
            if step == cut:
                state = json.loads(json.dumps(scheduler.state()))
                scheduler = scheduler_for(policy, world)
                scheduler.load(state)
            rollouts = scheduler.plan(320.0, world.active(), rng)
            scheduler.observe(world.step(rollouts, scheduler.size_D))
        return world.true_pass().tolist()

    assert scores(None) == scores(17)


def test_groups_of_different_sizes_cost_what_equal_ones_do():
    def spent(policy):
        world = World(FAMILIES["clean"][1], SMALL, 2)
        scheduler, rng = scheduler_for(policy, world), np.random.default_rng(0)
        costs, sizes = 0.0, set()
        for _ in range(SMALL.num_steps):
            rollouts = scheduler.plan(320.0, world.active(), rng)
            result = world.step(rollouts, scheduler.size_D)
            scheduler.observe(result)
            costs += result.cost_D.sum()
            sizes |= set() if scheduler.size_D is None else set(scheduler.size_D.tolist())
        return costs, sizes

    (fixed, _), (sized, sizes) = spent("value"), spent(SIZED)
    assert abs(sized / fixed - 1.0) < 0.1
    assert min(sizes) < GROUP_SIZE < max(sizes)
    assert all(GROUP_SIZE / 2 <= size <= GROUP_SIZE * 2 for size in sizes)


def test_without_labels_tasks_come_from_all_tiers_alike_and_show_no_tier():
    world = World(FAMILIES[UNTIERED][1], SMALL, 1)
    assert scheduler_for("value", world).tiers.mean_DK().shape == (20, 1)
    expected = world.true_pass().mean(axis=1)
    rollouts = np.full((20, 1), 40_000.0)
    drawn = world._drawn(rollouts, None)
    assert drawn.shape == (20, NUM_TIERS)
    assert np.allclose(drawn.sum(axis=1), 40_000.0)
    assert np.allclose(drawn / 40_000.0, 1.0 / NUM_TIERS, atol=0.05)
    result = world.step(rollouts)
    assert result.passed_DK.shape == (20, 1)
    shown = (result.passed_DK / result.completed_DK)[:, 0]
    assert np.allclose(shown, expected, atol=0.05)
    # Inside groups scores spread less than over all tasks of a domain.
    rates = result.passed_DK[:, 0] / result.completed_DK[:, 0]
    groups = result.completed_DK[:, 0] / GROUP_SIZE
    assert (result.spread_D <= groups * 2.0 * np.sqrt(rates * (1.0 - rates)) + 1e-9).all()


def test_no_domain_waits_beyond_the_bound_and_value_beats_uniform_and_published_bandits():
    names = ("value", "uniform", "sec", "dump")
    done = compare(scenario("clean"), names, Tier.S, 2)
    auc = {name: done.of(name).metrics["auc"].mean for name in names}
    assert done.of("value").metrics["late"].mean == 0
    assert auc["value"] > 1.05 * max(auc["uniform"], auc["sec"], auc["dump"])


def test_a_hacked_verifier_shows_more_than_is_true_and_audits_say_how_much():
    hacked = Family((0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0))
    world = World(hacked, SMALL, 0)
    for _ in range(SMALL.num_steps):
        world.step(np.full((20, 4), 200.0))
    assert (world.shown_pass() > world.true_pass()).all()
    deserved = (1.0 - world.audit()) * world.shown_pass().mean(axis=1)
    assert np.allclose(deserved, world.true_pass().mean(axis=1))


def test_gains_spill_over_to_the_others_of_a_cluster_only():
    world = World(FAMILIES["interference"][1], Size(60, 30, 16.0, 8), 2)
    gain = np.random.default_rng(0).random(60)
    for named in (world.cluster, world.rival):
        mean = world._mean_in(named, gain)
        for i in range(60):
            others = [gain[j] for j in range(60) if world.cluster[j] == named[i] and j != i]
            assert math.isclose(mean[i], np.mean(others) if others else 0.0, abs_tol=1e-12)


def test_newcomers_are_tried_in_every_tier_before_their_value_counts():
    world = World(FAMILIES["non_stationary"][1], SMALL, 4)
    late = ~world.active()
    assert late.any()
    scheduler, rng = scheduler_for("value", world), np.random.default_rng(0)
    for step in range(SMALL.num_steps):
        met = world.active()
        rollouts = scheduler.plan(320.0, met, rng)
        if step == 0 or (met & late).any():
            tried = met if step == 0 else met & late
            assert (rollouts[tried] >= 4).all()
            late &= ~met
        scheduler.observe(world.step(rollouts))
    assert not late.any()


@pytest.mark.parametrize("num_seeds", [-1, 0, 10**8])
def test_a_number_of_seeds_that_makes_no_sense_is_refused_at_once(num_seeds):
    with pytest.raises(UserError, match=f"{num_seeds} seeds"):
        compare(scenario("clean"), ("value",), Tier.S, num_seeds)


def test_intervals_are_students():
    found = interval([1.0, 2.0, 3.0])
    assert found.mean == 2.0
    assert math.isclose(found.half_width, 4.303 / math.sqrt(3), rel_tol=1e-3)
    assert math.isnan(interval([math.nan]).mean)
    assert interval([math.nan, 4.0]).mean == 4.0


def test_pictures_and_records_hold_every_policy(tmp_path):
    done = compare(scenario("gaming"), ("value", "uniform"), Tier.S, 1)
    for name in ("a.svg", "a.html"):
        draw([done], tmp_path / name)
        text = (tmp_path / name).read_text()
        assert "uniform" in text
        assert "polyline" in text
    assert {r["policy"] for r in json.loads(json.dumps(record(done)))["results"]} == {
        "value",
        "uniform",
    }
    draw([done], tmp_path / "a.PNG")
    assert (tmp_path / "a.PNG").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(UserError, match="cannot be written"):
        draw([done], tmp_path / "missing" / "a.svg")


def test_wrong_names_and_numbers_are_refused_with_a_fix():
    with pytest.raises(UserError, match="clear"):
        scenario("clear")
    with pytest.raises(UserError, match="best"):
        compare(scenario("clean"), ("best",), Tier.S, 1)
    with pytest.raises(UserError, match="0 seeds"):
        compare(scenario("clean"), ("value",), Tier.S, 0)
    assert len(scenarios()) == 13


def test_an_interval_says_no_more_than_was_measured() -> None:
    from burnish.plan.comparison import Interval

    nan = float("nan")
    assert Interval(0.5, 0.01).text("+-") == "0.5 +- 0.01"
    assert Interval(0.5, nan).text("+-") == "0.5"
    assert Interval(nan, nan).text("+-") == "-"
