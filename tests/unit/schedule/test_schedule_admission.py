import json
import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from burnish.core.errors import UserError
from burnish.core.vocabulary import DropReason
from burnish.schedule.admission import Admission, AdmissionConfig, AdmissionMode, GroupState
from burnish.schedule.batcher import BatchStatus, plan_batch


def conserved(ledger):
    c = ledger.counts()
    return c.dispatched == c.trained + c.running + c.waiting + sum(c.dropped.values())


class Run:
    """A run whose groups end in an arbitrary order, checked against the rules at every event."""

    def __init__(self, config, rng, drop_ratio=0.0, num_steps=None, speed=None):
        self.ledger = Admission(config, num_steps=num_steps)
        self.rng = rng
        self.drop_ratio = drop_ratio
        self.speed = speed or (lambda order: self.rng.random())
        self.next_id = 0
        self.batches = []
        self.trained_orders = []
        self.running = {}
        self.versions = {}

    def dispatch_all(self):
        ledger, config = self.ledger, self.ledger.config
        while ledger.may_dispatch():
            entry = ledger.dispatched(f"g/{self.next_id}")
            self.running[entry.group_id] = self.speed(entry.order)
            self.versions[entry.order] = entry.dispatched_version
            self.next_id += 1
            c = ledger.counts()
            if config.mode is AdmissionMode.BOUNDED_LAG:
                bound = (config.max_lag + ledger.step + 1) * config.groups_per_batch
                assert c.trained + c.waiting + c.running <= bound
            assert conserved(ledger)

    def finish_one(self):
        group = min(self.running, key=self.running.get)
        del self.running[group]
        self.ledger.completed(group)
        if self.rng.random() < self.drop_ratio:
            self.ledger.dropped(group, DropReason.ZERO_VARIANCE)
        assert conserved(self.ledger)

    def step(self):
        """Up to and including one publication."""
        for _ in range(10_000):
            self.dispatch_all()
            plan = plan_batch(self.ledger)
            assert plan.stale == ()
            if plan.status is BatchStatus.READY:
                break
            assert self.running, "a run that waits for nothing is stuck"
            assert set(plan.waits_for) <= set(self.running)
            self.finish_one()
        entries = {e.group_id: e for e in self.ledger.entries()}
        orders = [entries[g].order for g in plan.group_ids]
        assert orders == sorted(orders)
        for group in plan.group_ids:
            lag = self.ledger.version - entries[group].oldest_version
            assert 0 <= lag <= self.ledger.config.max_lag
        self.ledger.trained(plan.group_ids)
        self.trained_orders += orders
        self.batches.append(plan.group_ids)
        self.dispatch_all()
        while not self.ledger.may_publish():
            self.finish_one()
            self.dispatch_all()
        for _ in range(self.rng.randrange(3)):
            if self.running:
                self.finish_one()
        self.ledger.published(self.ledger.version + 1)


configs = st.builds(
    AdmissionConfig,
    mode=st.sampled_from(AdmissionMode),
    max_lag=st.integers(0, 4),
    groups_per_batch=st.integers(1, 6),
    max_running=st.one_of(st.none(), st.integers(1, 8)),
    max_refills=st.integers(0, 2),
)


@settings(max_examples=150, deadline=None)
@given(configs, st.integers(0, 2**32), st.sampled_from([0.0, 0.3, 0.9, 1.0]))
@example(AdmissionConfig(max_lag=2, groups_per_batch=4), 1, 0.3)
def test_any_run_conserves_groups_keeps_the_lag_and_never_gets_stuck(config, seed, drop_ratio):
    run = Run(config, random.Random(seed), drop_ratio, num_steps=12)
    for _ in range(12):
        run.step()
    assert run.ledger.step == 12
    assert not run.ledger.may_dispatch()
    if drop_ratio == 0.0:
        assert [len(b) for b in run.batches] == [config.groups_per_batch] * 12
        # Nothing was dispatched beyond the last batch, so nothing is left over.
        assert run.ledger.counts().trained == run.ledger.counts().dispatched


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 4), st.integers(1, 5), st.integers(0, 2**32))
def test_the_slowest_groups_are_trained_in_time_and_not_left_behind(max_lag, size, seed):
    config = AdmissionConfig(max_lag=max_lag, groups_per_batch=size)
    # Every third group takes longer than everything else together.
    run = Run(config, random.Random(seed), speed=lambda order: order + 1e9 * (order % 3 == 0))
    for _ in range(20):
        run.step()
    oldest_left = min((e.order for e in run.ledger.entries()), default=None)
    if oldest_left is not None:
        assert oldest_left >= (20 - 1) * size - max_lag * size


def test_on_policy_mode_trains_each_version_on_its_own_groups():
    run = Run(AdmissionConfig(max_lag=0, groups_per_batch=3), random.Random(0))
    for _ in range(5):
        run.step()
    assert run.trained_orders == list(range(15))


def test_a_batch_is_held_for_a_group_that_would_go_stale():
    ledger = Admission(AdmissionConfig(max_lag=1, groups_per_batch=2))
    for i in range(4):
        ledger.dispatched(f"g/{i}")
    for i in (1, 2, 3):
        ledger.completed(f"g/{i}")
    plan = plan_batch(ledger)
    assert plan.status is BatchStatus.READY
    assert plan.group_ids == ("g/1", "g/2")
    ledger.trained(plan.group_ids)
    assert plan_batch(ledger).status is BatchStatus.FILLING
    ledger.published(1)
    for i in (4, 5):
        ledger.dispatched(f"g/{i}")
        ledger.completed(f"g/{i}")
    plan = plan_batch(ledger)
    assert plan.status is BatchStatus.HELD
    assert plan.waits_for == ("g/0",)
    ledger.completed("g/0")
    assert plan_batch(ledger).group_ids == ("g/0", "g/3")


def test_groups_that_could_all_be_late_together_are_not_allowed_to():
    # Lag 2: passing over both slow groups of version 0 twice would leave three batches' worth due
    # at once; each alone is still within its lag.
    ledger = Admission(AdmissionConfig(max_lag=2, groups_per_batch=1))
    for i in range(3):
        ledger.dispatched(f"g/{i}")
    ledger.completed("g/2")
    assert plan_batch(ledger).group_ids == ("g/2",)
    ledger.trained(("g/2",))
    ledger.published(1)
    ledger.dispatched("g/3")
    ledger.completed("g/3")
    plan = plan_batch(ledger)
    assert plan.status is BatchStatus.HELD
    assert plan.waits_for == ("g/0", "g/1")


def test_fixed_lag_batches_do_not_depend_on_the_order_of_completion():
    config = AdmissionConfig(
        mode=AdmissionMode.FIXED_LAG, max_lag=1, groups_per_batch=3, max_running=2
    )
    traces = []
    for seed in range(5):
        run = Run(config, random.Random(seed), num_steps=6)
        for _ in range(6):
            run.step()
        versions = dict(sorted(run.versions.items()))
        traces.append((run.batches, versions))
    assert all(trace == traces[0] for trace in traces)
    batches, versions = traces[0]
    assert list(versions.values()) == [0] * 6 + [1] * 3 + [2] * 3 + [3] * 3 + [4] * 3
    assert batches[2] == ("g/6", "g/7", "g/8")


def test_fixed_lag_does_not_replace_what_was_dropped():
    config = AdmissionConfig(mode=AdmissionMode.FIXED_LAG, max_lag=0, groups_per_batch=3)
    ledger = Admission(config)
    for i in range(3):
        ledger.dispatched(f"g/{i}")
        ledger.completed(f"g/{i}")
    ledger.dropped("g/1", DropReason.ZERO_VARIANCE)
    assert not ledger.may_dispatch()
    assert plan_batch(ledger).group_ids == ("g/0", "g/2")


def test_fixed_lag_publishes_only_when_nothing_runs():
    ledger = Admission(AdmissionConfig(mode=AdmissionMode.FIXED_LAG, groups_per_batch=1))
    ledger.dispatched("g/0")
    ledger.dispatched("g/1")
    ledger.completed("g/0")
    ledger.trained(("g/0",))
    assert not ledger.may_publish()
    with pytest.raises(AssertionError, match="still runs"):
        ledger.published(1)
    ledger.completed("g/1")
    ledger.published(1)


def test_fixed_lag_publishes_only_when_all_groups_of_the_version_are_dispatched():
    config = AdmissionConfig(
        mode=AdmissionMode.FIXED_LAG, max_lag=1, groups_per_batch=1, max_running=1
    )
    ledger = Admission(config)
    ledger.dispatched("g/0")
    ledger.completed("g/0")
    ledger.trained(("g/0",))
    # g/1 belongs to version 0 too and only waited for a free place.
    assert not ledger.may_publish()
    ledger.dispatched("g/1")
    ledger.completed("g/1")
    assert ledger.may_publish()


def test_tokens_older_than_announced_are_reported_as_stale():
    ledger = Admission(AdmissionConfig(max_lag=1, groups_per_batch=1), version=5)
    ledger.dispatched("g/0")
    ledger.completed("g/0", oldest_version=3)
    assert not ledger.admissible(3)
    plan = plan_batch(ledger)
    assert plan.stale == ("g/0",)
    assert plan.status is BatchStatus.FILLING
    ledger.dropped("g/0", DropReason.STALE)
    assert ledger.counts().dropped == {DropReason.STALE: 1}


@settings(max_examples=60, deadline=None)
@given(configs, st.integers(0, 2**32), st.integers(0, 8))
def test_a_saved_and_restored_ledger_goes_on_as_if_nothing_had_happened(config, seed, cut):
    def trace(interrupted):
        run = Run(config, random.Random(seed), 0.3, num_steps=10)
        for step in range(10):
            if interrupted and step == cut:
                state = json.loads(json.dumps(run.ledger.state()))
                run.ledger = Admission.from_state(state, config)
                assert {
                    e.group_id for e in run.ledger.entries() if e.state is GroupState.RUNNING
                } == set(run.running)
            run.step()
        return run.batches, run.ledger.state()

    assert trace(interrupted=True) == trace(interrupted=False)


@pytest.mark.parametrize(
    ("act", "text"),
    [
        (lambda ledger: ledger.dispatched("g/9"), "lag bound"),
        (lambda ledger: ledger.trained(("g/0",)), "before it was judged"),
        (lambda ledger: ledger.published(1), "without a batch"),
    ],
)
def test_breaking_the_protocol_is_caught_at_once(act, text):
    ledger = Admission(AdmissionConfig(max_lag=0, groups_per_batch=1))
    ledger.dispatched("g/0")
    with pytest.raises(AssertionError, match=text):
        act(ledger)


def test_a_ledger_of_another_version_is_refused():
    state = {**Admission(AdmissionConfig()).state(), "version": 0}
    with pytest.raises(UserError, match="version 0"):
        Admission.from_state(state, AdmissionConfig())


def test_the_used_part_of_the_lag_grows_with_each_version_and_is_one_when_due():
    ledger = Admission(AdmissionConfig(max_lag=2, groups_per_batch=1), 1)
    ledger.dispatched("d/0")
    ledger.dispatched("d/1")
    ledger.completed("d/1")
    seen = [ledger.used_lag("d/0")]
    for version in (2, 3):
        ledger.trained(["d/1"] if version == 2 else [])
        ledger.published(version)
        seen.append(ledger.used_lag("d/0"))
    assert seen == [0.0, 0.5, 1.0]
    assert ledger.used_lag("never/seen") == 0.0
    assert Admission(AdmissionConfig(max_lag=0), 1).used_lag("d/0") == 0.0
