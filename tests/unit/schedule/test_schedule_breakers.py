import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from burnish.core.clock import ManualClock
from burnish.core.vocabulary import FailureKind
from burnish.schedule.breakers import BreakerConfig, Breakers, BreakerState

CONFIG = BreakerConfig(
    window_s=100, min_failures=3, failure_ratio=0.5, cooldown_s=10, max_cooldown_s=40
)


def make():
    clock = ManualClock(1000.0)
    return Breakers(CONFIG, clock), clock


def trip(breakers, domain="d", kind=FailureKind.SANDBOX):
    for _ in range(CONFIG.min_failures):
        breakers.failure(domain, kind)


def state_of(breakers):
    return breakers.table()[0].state


def test_opens_when_the_error_budget_is_spent_and_only_for_that_domain():
    breakers, _ = make()
    breakers.failure("d", FailureKind.SANDBOX)
    breakers.failure("d", FailureKind.SANDBOX)
    assert breakers.allow("d")
    breakers.failure("d", FailureKind.SANDBOX)
    assert state_of(breakers) is BreakerState.OPEN
    assert not breakers.allow("d")
    assert breakers.allow("other")
    assert breakers.blocked() == {"d"}


def test_policy_failures_never_trip_it():
    breakers, _ = make()
    for _ in range(1000):
        breakers.failure("d", FailureKind.POLICY)
    assert breakers.allow("d")
    assert breakers.table() == ()


def test_failures_of_different_kinds_do_not_add_up():
    breakers, _ = make()
    for kind in (FailureKind.SANDBOX, FailureKind.VERIFIER, FailureKind.INFRA, FailureKind.DATA):
        breakers.failure("d", kind)
        breakers.failure("d", kind)
    assert breakers.allow("d")


def test_a_low_rate_of_failures_is_tolerated():
    breakers, _ = make()
    for _ in range(50):
        breakers.failure("d", FailureKind.INFRA)
        breakers.success("d")
        breakers.success("d")
    assert breakers.allow("d")


def test_failures_outside_the_window_are_forgotten():
    breakers, clock = make()
    breakers.failure("d", FailureKind.INFRA)
    breakers.failure("d", FailureKind.INFRA)
    clock.advance(CONFIG.window_s + 1)
    breakers.failure("d", FailureKind.INFRA)
    assert breakers.allow("d")


def test_half_open_lets_one_probe_through_and_closes_when_it_succeeds():
    breakers, clock = make()
    trip(breakers)
    clock.advance(9.9)
    assert not breakers.allow("d")
    clock.advance(0.1)
    assert state_of(breakers) is BreakerState.HALF_OPEN
    assert breakers.allow("d")
    assert not breakers.allow("d")
    breakers.success("d")
    assert state_of(breakers) is BreakerState.CLOSED
    # The old failures are gone: one more does not trip it again.
    breakers.failure("d", FailureKind.SANDBOX)
    assert breakers.allow("d")


def test_cool_down_doubles_with_every_failed_probe_up_to_its_limit():
    breakers, clock = make()
    trip(breakers)
    for expected in (10.0, 20.0, 40.0, 40.0):
        assert breakers.table()[0].retry_in_s == pytest.approx(expected)
        clock.advance(expected)
        assert breakers.allow("d")
        breakers.failure("d", FailureKind.SANDBOX)
    assert breakers.table()[0].num_opened == 5


def test_a_probe_that_fails_in_another_way_opens_it_again():
    breakers, clock = make()
    trip(breakers)
    clock.advance(10)
    assert breakers.allow("d")
    breakers.failure("d", FailureKind.VERIFIER)
    assert state_of(breakers) is BreakerState.OPEN


def test_a_probe_that_never_reports_is_given_up():
    breakers, clock = make()
    trip(breakers)
    clock.advance(10)
    assert breakers.allow("d")
    clock.advance(10)
    assert breakers.allow("d")


def test_results_of_attempts_from_before_the_opening_do_not_close_it():
    breakers, _ = make()
    trip(breakers)
    breakers.success("d")
    assert state_of(breakers) is BreakerState.OPEN


def test_state_survives_a_restart_with_another_clock():
    breakers, clock = make()
    trip(breakers)
    clock.advance(4)
    state = json.loads(json.dumps(breakers.state()))
    later = ManualClock(5.0)
    again = Breakers.from_state(state, CONFIG, later)
    assert again.table() == breakers.table()
    later.advance(5.9)
    assert not again.allow("d")
    later.advance(0.2)
    assert again.allow("d")


events = st.lists(
    st.tuples(
        st.sampled_from(["allow", "success", "advance", *FailureKind]),
        st.sampled_from(["a", "b"]),
    ),
    max_size=200,
)


@settings(max_examples=80, deadline=None)
@given(events)
def test_whatever_happens_every_domain_is_tried_again_within_the_longest_pause(sequence):
    breakers, clock = make()
    for event, domain in sequence:
        if event == "allow":
            breakers.allow(domain)
        elif event == "success":
            breakers.success(domain)
        elif event == "advance":
            clock.advance(7.0)
        else:
            breakers.failure(domain, FailureKind(event))
    clock.advance(CONFIG.max_cooldown_s)
    assert breakers.blocked() == frozenset()
