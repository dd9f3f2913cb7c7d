import random
from types import SimpleNamespace

import pytest

from burnish.plan.pipeline.contract import ClusterModel
from burnish.plan.pipeline.engines import EngineModel, Fleet
from burnish.plan.pipeline.flow_system import Flow
from burnish.plan.pipeline.simulator import Simulator
from burnish.plan.pipeline.systems import April, AsyncCap, SyncBarrier
from burnish.plan.pipeline.workload import draw_workload, failure_ratio

BATCH, GROUP = 8, 4


def simulate(system, *, train_ratio=0.0, seed=3, domains=12, steps=3, warmup=1, broken=0.0):
    workload = draw_workload(domains, seed, broken_ratio=broken)
    cluster = ClusterModel(
        num_accelerators=4, train_ratio=train_ratio, engine=EngineModel(num_slots=16)
    )
    sim = Simulator(workload, cluster, system, seed=seed, group_size=GROUP)
    return sim, sim.run(steps, warmup)


@pytest.mark.parametrize(
    ("make", "ratio"),
    [
        (lambda: SyncBarrier(BATCH), 0.0),
        (lambda: April(BATCH, 2.0), 0.0),
        (lambda: AsyncCap(BATCH, 2, 1.0), 0.25),
        (lambda: Flow(BATCH, 2), 0.25),
    ],
)
def test_every_system_trains_whole_batches_and_wastes_less_than_all(make, ratio):
    sim, result = simulate(make(), train_ratio=ratio)
    assert sim.version == 4
    assert result.tokens_per_s > 0
    assert 0.0 < result.slot_load <= 1.0
    assert 0.0 <= result.idle_ratio < 1.0
    assert 0.0 <= result.waste_ratio < 0.5


def test_the_same_seed_gives_the_same_run_and_another_one_does_not():
    first = simulate(Flow(BATCH, 2), train_ratio=0.25)[1]
    assert simulate(Flow(BATCH, 2), train_ratio=0.25)[1] == first
    assert simulate(Flow(BATCH, 2), train_ratio=0.25, seed=4)[1] != first


def test_a_barrier_never_trains_what_older_weights_made():
    assert simulate(SyncBarrier(BATCH))[1].lag_mean == 0.0


def test_no_episode_is_lost_or_counted_twice():
    sim, _ = simulate(Flow(BATCH, 2), train_ratio=0.25, broken=0.5)
    coming = sum(e.is_coming for g in sim.groups.values() for e in g.episodes)
    assert sim.num_coming == coming
    on_engines = [e for engine in sim.engines for _, _, e in engine.heap]
    assert len({id(e) for e in (*on_engines, *sim.queue)}) == len(on_engines) + len(sim.queue)
    assert not any(e.is_over for e in (*on_engines, *sim.queue))


def test_breakers_stop_most_failures_of_broken_images_and_leave_the_healthy_alone():
    guarded = Flow(BATCH, 2)
    _, with_breakers = simulate(guarded, train_ratio=0.25, broken=0.5, domains=20, steps=8)
    _, without = simulate(
        Flow(BATCH, 2, with_breakers=False), train_ratio=0.25, broken=0.5, domains=20, steps=8
    )
    assert with_breakers.num_failed < 0.5 * without.num_failed
    assert guarded.opened
    assert all(attempts <= 16 for attempts, _ in guarded.opened.values())
    assert guarded.false_opens == []


def test_the_failure_ratio_agrees_with_what_is_simulated():
    workload = draw_workload(30, 1, broken_ratio=0.5)
    ratios = [failure_ratio(d, workload) for d in workload.domains]
    assert all(0.0 <= r <= 1.0 for r in ratios)
    assert sum(r > 0.5 for r in ratios) >= 3
    assert all(r == 0.0 for r, d in zip(ratios, workload.domains, strict=True) if not d.is_agent)


def test_the_later_samples_of_a_probe_start_when_one_came_through_or_all_first_failed():
    class Staged(SyncBarrier):
        def start_one(self, sim):
            domain = sim.workload.domains[sim.num_groups % 2]
            sim.launch(domain, f"{domain.name}/{sim.num_groups}", 2)

        def failed(self, sim, episode):
            return False

        def judged(self, sim, episode):
            sim.release(episode.group)

    sim, result = simulate(Staged(BATCH), domains=2, broken=1.0)
    assert sim.version == 4
    assert result.tokens_per_s > 0
    assert all(e.is_coming is False for g in sim.groups.values() for e in g.held)


@pytest.mark.parametrize("seed", range(20))
def test_the_idlest_engine_is_the_first_of_those_with_fewest_sequences(seed):
    dice = random.Random(seed)
    fleet = Fleet(EngineModel(num_slots=3), 5)
    running = []
    for number in range(400):
        engine = dice.choice(fleet.engines)
        kind = dice.randrange(6)
        if kind < 2 and engine.has_room and not engine.frozen:
            episode = SimpleNamespace(segment=1e9)
            engine.add(episode, number)
            running.append((engine, episode))
            fleet.changed(engine)
        elif kind < 4 and running:
            engine, episode = running.pop(dice.randrange(len(running)))
            engine.remove(episode)
            fleet.changed(engine)
        elif kind == 4 and not dice.randrange(8):
            for each in fleet.engines:
                each.frozen = True
        elif engine.frozen:
            engine.frozen = False
            fleet.changed(engine)
        awake = [e for e in fleet.engines if e.has_room and not e.frozen]
        assert fleet.idlest() is min(awake, key=lambda e: e.load, default=None)
        assert fleet.num_running == len(running)


@pytest.mark.parametrize("broken", [0.0, 0.5])
def test_a_plan_that_is_not_made_again_would_have_been_the_same(broken, monkeypatch):
    def runs():
        return [
            simulate(Flow(BATCH, lag), train_ratio=0.25, seed=seed, steps=8, broken=broken)[1]
            for lag in (0, 1, 3)
            for seed in range(3)
        ]

    lazy = runs()
    monkeypatch.setattr(Flow, "_nothing_new", lambda self, sim: False)
    assert runs() == lazy
