import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from burnish.core.clock import ManualClock
from burnish.core.records import Failure
from burnish.core.vocabulary import FailureKind
from burnish.schedule.breakers.base import Attempt, BreakerConfig, BreakerState
from burnish.schedule.breakers.cases import CaseQueue
from burnish.schedule.breakers.hedging import Hedges
from burnish.schedule.breakers.panel import Breakers
from burnish.schedule.breakers.retries import RetryBudget, RetryConfig

CONFIG = BreakerConfig(cooldown_s=10, max_cooldown_s=40)
SPREAD = 0.2


def make():
    clock = ManualClock(1000.0)
    return Breakers(CONFIG, clock), clock


def fail(breakers, task="t", kind=FailureKind.SANDBOX, domain="d", image=""):
    return breakers.attempt(Attempt(domain=domain, task=task, image=image, failure=kind))


def succeed(breakers, task="t", domain="d", image=""):
    return breakers.attempt(Attempt(domain=domain, task=task, image=image))


def trip(breakers, **about):
    for n in range(4):
        reaction = fail(breakers, task=f"t{n}", **about)
    return reaction


def state_of(breakers):
    return breakers.table()[0].state


def wait_out(clock, breakers):
    clock.advance(breakers.table()[0].retry_in_s + 1e-6)


def test_four_failures_of_different_tasks_open_it_and_say_so_once():
    breakers, _ = make()
    reactions = [fail(breakers, task=f"t{n}") for n in range(4)]
    assert [bool(r.opened) for r in reactions] == [False, False, False, True]
    assert breakers.blocked() == {"d"}
    assert not fail(breakers, task="late").opened


def test_one_poisoned_task_among_others_that_come_through_is_given_up_and_opens_nothing():
    breakers, _ = make()
    succeed(breakers, task="other")
    reactions = [fail(breakers) for _ in range(50)]
    assert [r.abandon for r in reactions[:4]] == [False, False, True, True]
    assert not any(r.opened for r in reactions)
    assert breakers.blocked() == frozenset()
    assert fail(breakers, task="another").opened or fail(breakers, task="another").opened


def test_a_task_that_fails_now_and_then_is_not_given_up():
    breakers, _ = make()
    for _ in range(100):
        assert not fail(breakers).abandon
        succeed(breakers)


def test_where_nothing_came_through_yet_one_task_speaks_for_all():
    breakers, _ = make()
    reactions = [fail(breakers) for _ in range(4)]
    assert [bool(r.opened) for r in reactions] == [False, False, False, True]
    assert not any(r.abandon for r in reactions)


def test_a_task_of_which_a_sample_came_through_is_not_poisoned():
    breakers, _ = make()
    succeed(breakers, task="other")
    succeed(breakers)
    assert not any(fail(breakers).abandon for _ in range(20))


def test_only_a_bounded_number_of_tasks_that_came_through_is_remembered():
    breakers, _ = make()
    for n in range(1000):
        succeed(breakers, task=f"t{n}")
    (row,) = breakers.state()["answered"]
    assert row[2][-1] == "t999"
    assert len(row[2]) == 64


def test_a_group_behind_a_half_open_breaker_is_told_that_it_is_a_probe():
    breakers, clock = make()
    assert not breakers.dispatched("d/1", "d")
    trip(breakers)
    wait_out(clock, breakers)
    assert breakers.dispatched("d/2", "d")
    assert not breakers.dispatched("e/1", "e")


def test_what_a_retry_would_only_repeat_counts_double():
    breakers, _ = make()
    reactions = [fail(breakers, task=f"t{n}", kind=FailureKind.VERIFIER) for n in range(2)]
    assert reactions[-1].opened


def test_policy_failures_never_trip_it():
    breakers, _ = make()
    for n in range(1000):
        fail(breakers, task=f"t{n}", kind=FailureKind.POLICY)
    assert breakers.blocked() == frozenset()
    assert breakers.table() == ()


def test_failures_of_different_kinds_do_not_add_up():
    breakers, _ = make()
    for kind in (FailureKind.SANDBOX, FailureKind.INFRA):
        for n in range(3):
            assert not fail(breakers, task=f"t{n}", kind=kind).opened


def test_an_image_is_paused_alone_and_the_domain_only_with_its_last_one():
    breakers, _ = make()
    succeed(breakers, image="good")
    trip(breakers, image="bad")
    assert breakers.refuses("d", "bad")
    assert not breakers.refuses("d", "good")
    assert breakers.blocked() == frozenset()
    trip(breakers, image="good")
    assert breakers.blocked() == {"d"}


def test_half_open_lets_one_group_at_a_time_through_and_two_clean_ones_close_it():
    breakers, clock = make()
    trip(breakers)
    assert breakers.table()[0].retry_in_s == pytest.approx(10, rel=SPREAD)
    wait_out(clock, breakers)
    assert state_of(breakers) is BreakerState.HALF_OPEN
    for group in ("d/1", "d/2"):
        assert breakers.blocked() == frozenset()
        breakers.dispatched(group, "d")
        assert breakers.blocked() == {"d"}
        succeed(breakers)
        breakers.group_done(group, clean=True)
    assert state_of(breakers) is BreakerState.CLOSED
    assert breakers.blocked() == frozenset()
    assert not fail(breakers, task="new").opened


def test_a_failed_probe_doubles_the_pause_up_to_its_limit():
    breakers, clock = make()
    trip(breakers)
    base = breakers.table()[0].retry_in_s
    for _ in range(6):
        wait_out(clock, breakers)
        breakers.dispatched("d/9", "d")
        assert fail(breakers).opened
        assert base < breakers.table()[0].retry_in_s <= 40 * (1 + SPREAD)
    assert breakers.table()[0].retry_in_s >= 40 * (1 - SPREAD)
    assert breakers.table()[0].num_opened == 7


def test_a_probe_that_fails_in_another_way_is_no_sign_of_health():
    breakers, clock = make()
    trip(breakers)
    wait_out(clock, breakers)
    breakers.dispatched("d/9", "d")
    fail(breakers, kind=FailureKind.VERIFIER)
    assert state_of(breakers) is BreakerState.OPEN


def test_a_probe_that_never_reports_back_is_given_up():
    breakers, clock = make()
    trip(breakers)
    wait_out(clock, breakers)
    breakers.dispatched("d/9", "d")
    assert breakers.blocked() == {"d"}
    clock.advance(10 * (1 + SPREAD) + 1)
    assert breakers.blocked() == frozenset()


def test_late_successes_from_before_do_not_close_it():
    breakers, _ = make()
    trip(breakers)
    succeed(breakers)
    assert state_of(breakers) is BreakerState.OPEN


def test_a_group_that_used_half_of_its_lag_gets_no_further_try_and_pays_nothing():
    budget = RetryBudget(RetryConfig(burst=1))
    assert not budget.may_retry(FailureKind.SANDBOX, 1, used_lag=0.5)
    assert budget.may_retry(FailureKind.SANDBOX, 1, used_lag=0.49)
    assert (budget.num_late, budget.num_retries, budget.num_refused) == (1, 1, 0)


def test_state_survives_json_and_a_restart_of_the_clock():
    breakers, clock = make()
    trip(breakers)
    fail(breakers, domain="e", image="i")
    clock.advance(3)
    state = json.loads(json.dumps(breakers.state()))
    again = Breakers.from_state(state, CONFIG, ManualClock(5.0))
    assert [r.state for r in again.table()] == [r.state for r in breakers.table()]
    for new, old in zip(again.table(), breakers.table(), strict=True):
        assert new.retry_in_s == pytest.approx(old.retry_in_s)
        assert new.evidence == old.evidence
    assert again.blocked() == breakers.blocked()


def opening_probability(failure_ratio, attempts):
    """Exact: the evidence is a walk of whole steps, absorbed at four."""
    at = [1.0, 0.0, 0.0, 0.0]
    opened = 0.0
    for _ in range(attempts):
        nxt = [0.0] * 4
        for level, p in enumerate(at):
            nxt[max(level - 1, 0)] += p * (1 - failure_ratio)
            if level == 3:
                opened += p * failure_ratio
            else:
                nxt[level + 1] += p * failure_ratio
        at = nxt
    return opened


def test_a_dead_domain_opens_within_eight_attempts_and_a_healthy_one_almost_never():
    assert opening_probability(0.95, 8) > 0.99
    assert opening_probability(0.9, 8) > 0.95
    # A hundred attempts of a domain that fails one time in twenty.
    assert opening_probability(0.05, 100) < 0.01


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["allow", "wait", "ok", *FailureKind]),
        st.sampled_from(["a", "b"]),
        st.sampled_from(["", "i"]),
    ),
    max_size=150,
)


@given(EVENTS)
@settings(max_examples=60, deadline=None)
def test_whatever_happens_every_domain_comes_back_after_the_longest_pause(events):
    breakers, clock = make()
    for n, (event, domain, image) in enumerate(events):
        if event == "allow":
            if not breakers.refuses(domain, image):
                breakers.dispatched(f"{domain}/{n}", domain, image)
        elif event == "wait":
            clock.advance(7)
        else:
            kind = None if event == "ok" else FailureKind(event)
            breakers.attempt(Attempt(domain=domain, task=f"t{n % 5}", image=image, failure=kind))
            assert all(0.0 <= r.evidence <= CONFIG.threshold for r in breakers.table())
    # A probe under way and the pause behind it, both at their longest.
    clock.advance(2 * CONFIG.max_cooldown_s * (1 + SPREAD) + 1)
    assert breakers.blocked() == frozenset()


@given(st.lists(st.booleans(), max_size=400))
def test_retries_never_exceed_their_part_of_the_attempts(begins):
    config = RetryConfig(max_attempts=3, budget_ratio=0.1, burst=5)
    budget = RetryBudget(config)
    for first in begins:
        if first:
            budget.started()
        else:
            budget.may_retry(FailureKind.SANDBOX, 1)
        assert budget.num_retries <= config.burst + config.budget_ratio * budget.num_first + 1e-9


def test_no_retry_for_what_would_only_repeat_itself_or_beyond_the_limit():
    budget = RetryBudget(RetryConfig(max_attempts=3))
    assert not budget.may_retry(FailureKind.VERIFIER, 1)
    assert not budget.may_retry(FailureKind.INFRA, 3)
    assert budget.may_retry(FailureKind.INFRA, 2)


def test_equal_cases_are_counted_and_the_oldest_gives_way():
    queue = CaseQueue(limit=2)
    broken = Failure(kind=FailureKind.DATA, where="load", message="no file")
    assert queue.report("d", "d/1", "", "sha", broken)
    assert queue.report("d", "d/1", "", "sha", broken)
    machine = Failure(kind=FailureKind.INFRA, where="load", message="out of memory")
    assert not queue.report("d", "d/1", "", "sha", machine)
    queue.report("d", "d/2", "", "sha", broken)
    queue.report("d", "d/3", "", "sha", broken)
    assert queue.num_lost == 1
    assert [(c.task, c.num_seen) for c in queue.take()] == [("d/2", 1), ("d/3", 1)]
    assert queue.take() == ()


def test_hedges_wait_for_the_tail_and_stop_when_everything_is_slow():
    hedges = Hedges()
    assert hedges.delay_s("reset") is None
    for n in range(100):
        hedges.answered("reset", 1.0 + n / 100)
    delay = hedges.delay_s("reset")
    assert delay == pytest.approx(1.95, rel=0.1)
    for _ in range(4):
        assert hedges.delay_s("reset") is not None
        hedges.asked_again()
    assert hedges.delay_s("reset") is None
