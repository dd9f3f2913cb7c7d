import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from burnish.schedule.domains import DomainScheduler
from burnish.schedule.flow.durations import Durations, Sketch
from burnish.schedule.flow.load import EngineLoad, LoadConfig, LoadControl
from burnish.schedule.flow.order import Lengths, Waiting, rank
from burnish.schedule.flow.resources import GroupCosts
from burnish.schedule.flow.rounds import LongTail
from burnish.schedule.picks import CostUnit, DomainScheduleConfig
from burnish.schedule.values.names import PolicyName

POSITIVE = st.floats(1e-3, 1e6)


@given(st.lists(POSITIVE, min_size=1, max_size=60), st.floats(0.01, 1.0))
def test_a_sketch_without_decay_is_right_to_its_bucket(values, q):
    sketch = Sketch(decay=1.0)
    for value in values:
        sketch.add(value)
    exact = sorted(values)[max(math.ceil(q * len(values)) - 1, 0)]
    assert sketch.quantile(q) == pytest.approx(exact, rel=0.16)
    assert sketch.mean() == pytest.approx(sum(values) / len(values))


def test_a_sketch_forgets_and_survives_any_number_of_observations():
    sketch = Sketch()
    for _ in range(20_000):
        sketch.add(1.0)
    for _ in range(1000):
        sketch.add(100.0)
    assert sketch.quantile(0.1) == pytest.approx(100.0, rel=0.1)
    again = Sketch.from_state(json.loads(json.dumps(sketch.state())))
    again.add(5.0)
    sketch.add(5.0)
    assert again.state() == sketch.state()


def test_what_has_lasted_long_is_expected_to_last_longer():
    sketch = Sketch()
    for value in (1.0, 1.0, 1.0, 50.0):
        sketch.add(value)
    assert sketch.quantile(0.5) < 2
    assert sketch.quantile(0.5, above=10.0) == pytest.approx(50, rel=0.1)
    assert sketch.quantile(0.5, above=1000.0) == 1000.0


def test_a_young_key_borrows_from_all():
    durations = Durations(min_count=3)
    for _ in range(10):
        durations.observe("old", 10.0)
    durations.observe("young", 1000.0)
    assert durations.quantile("young", 0.5) < 20
    for _ in range(2):
        durations.observe("young", 1000.0)
    assert durations.quantile("young", 0.5) == pytest.approx(1000, rel=0.1)


def load(running=0, waiting=0, kv=0.0, preemptions=0, queue_s=0.0, slots=100):
    return EngineLoad(slots, running, waiting, kv, preemptions, queue_s)


def test_room_is_what_the_target_leaves_after_those_that_are_still_coming():
    control = LoadControl(LoadConfig())
    assert control.room(load(running=60, waiting=5), 10, 0.0) == 25
    assert control.room(load(running=100, waiting=5), 0, 0.0) == 0


@pytest.mark.parametrize("trouble", [{"kv": 0.95}, {"preemptions": 1}, {"queue_s": 5.0}])
def test_every_sign_of_too_much_load_backs_off_and_quiet_brings_it_back(trouble):
    control = LoadControl(LoadConfig())
    control.room(load(), 0, 0.0)
    control.room(load(running=100, waiting=9, **trouble), 0, 10.0)
    lowered = control.target_ratio
    assert lowered == pytest.approx(0.95)
    control.room(load(preemptions=trouble.get("preemptions", 0)), 0, 20.0)
    assert lowered < control.target_ratio <= 1.0


@given(
    st.lists(
        st.tuples(
            st.integers(0, 200),
            st.integers(0, 50),
            st.floats(0, 1),
            st.floats(0, 9),
            st.floats(0, 9),
        ),
        max_size=80,
    )
)
def test_the_target_never_leaves_its_bounds_and_room_never_exceeds_it(events):
    config = LoadConfig(max_ratio=1.2)
    control, now = LoadControl(config), 0.0
    for running, waiting, kv, queue_s, elapsed in events:
        now += elapsed
        room = control.room(load(running, waiting, kv, queue_s=queue_s), 3, now)
        assert config.min_ratio <= control.target_ratio <= config.max_ratio
        assert 0 <= room <= max(control.target_ratio * 100 - running - waiting - 3, 0)


def waiting(name="r", turn=0, deficit=0.0, predicted=0.0, arrived_s=0.0):
    return Waiting(name, "d", turn, deficit, predicted, arrived_s)


def test_continuing_turns_then_deficit_then_the_longest():
    queue = [
        waiting("short", predicted=1),
        waiting("long", predicted=9),
        waiting("owed", deficit=1.0),
        waiting("turn", turn=2),
    ]
    order = [w.request_id for w in sorted(queue, key=lambda w: rank(w, 1.0))]
    assert order == ["turn", "owed", "long", "short"]


def test_patience_outranks_every_better_claim():
    old, new = waiting("old", arrived_s=0.0), waiting("new", turn=5, arrived_s=31.0)
    assert rank(old, 31.0) < rank(new, 31.0)


def test_siblings_tell_more_than_the_domain():
    lengths = Lengths()
    assert lengths.predict("d", "d/1") == 0.0
    for _ in range(20):
        lengths.finished("d", "d/0", 100.0)
    lengths.finished("d", "d/1", 900.0)
    assert lengths.predict("d", "d/1") == 900.0
    assert lengths.predict("d", "d/2") == pytest.approx(100, rel=0.1)
    lengths.forget("d/1")
    assert lengths.predict("d", "d/1") < 900


@given(st.lists(st.tuples(st.floats(0.5, 5.0), st.floats(0.0, 2.0)), min_size=2, max_size=4))
@settings(max_examples=30, deadline=None)
def test_dominant_costs_equalise_dominant_shares_within_a_few_groups(demands):
    names = [f"d{n}" for n in range(len(demands))]
    config = DomainScheduleConfig(
        policy=PolicyName.EQUAL_COST, cost_unit=CostUnit.DOMINANT, warmup_picks=1
    )
    scheduler, costs = DomainScheduler(names, config), GroupCosts(num_slots=4, num_boxes=1)
    used = dict.fromkeys(names, 0.0)
    for step in range(200):
        domain = scheduler.next().domain
        engine_s, box_s = demands[names.index(domain)]
        cost = costs.cost(episodes_s=engine_s + box_s, box_s=box_s, num_tokens=9.0)
        used[domain] += cost
        scheduler.observe(
            domain, pass_rate=0.5, mean_score=0.5, num_rollouts=4, step=step, cost_dominant=cost
        )
    # No domain would swap: nobody is ahead of another by more than two groups of the dearest.
    dearest = max(max(engine / 4, box) for engine, box in demands)
    assert max(used.values()) - min(used.values()) <= 2 * dearest + 1e-9


def test_a_group_costs_what_it_takes_of_its_scarcest_resource():
    costs = GroupCosts(num_slots=10, num_boxes=2)
    assert costs.cost(episodes_s=10.0, box_s=0.0, num_tokens=100) == pytest.approx(1.0)
    assert costs.cost(episodes_s=10.0, box_s=9.0, num_tokens=100) == pytest.approx(4.5)
    costs.trained(100, 7.0)
    assert costs.cost(episodes_s=10.0, box_s=9.0, num_tokens=100) == pytest.approx(7.0)


@given(st.lists(st.floats(0.0, 20.0), max_size=60), st.integers(1, 5))
def test_every_deferred_pick_comes_back_in_order_and_in_time(predictions, size):
    tail, put_off, back = LongTail(size, max_wait=3), [], []
    for batch, predicted in enumerate(predictions):
        if tail.defers(f"g{batch}", predicted, 1.0, batch):
            put_off.append((f"g{batch}", batch))
        got = tail.round(batch)
        assert len(got) <= size
        back += [(g, batch) for g in got]
    for batch in range(len(predictions), len(predictions) + 200):
        back += [(g, batch) for g in tail.round(batch)]
    assert [g for g, _ in back] == [g for g, _ in put_off]
    assert len(tail) == 0
    if size == 1:
        assert all(came - went <= 3 for (_, came), (_, went) in zip(back, put_off, strict=True))
