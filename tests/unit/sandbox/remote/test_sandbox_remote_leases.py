"""Who is still there."""

from hypothesis import given
from hypothesis import strategies as st

from burnish.core.clock import ManualClock
from burnish.sandbox.remote.leases import Leases


def test_a_session_that_is_heard_of_stays() -> None:
    clock = ManualClock()
    leases = Leases(clock, 10)
    leases.renew("a")
    for _ in range(10):
        clock.advance(4)
        leases.renew("a")
        assert leases.expired() == []
    assert leases.left_s("a") == 10


def test_a_silent_session_expires_once_and_is_forgotten() -> None:
    clock = ManualClock()
    leases = Leases(clock, 10)
    leases.renew("a")
    gone = []
    for _ in range(10):
        clock.advance(2)
        gone += leases.expired()
    assert gone == ["a"]
    assert leases.left_s("a") == 0


def test_time_in_which_nobody_could_be_heard_counts_for_nobody() -> None:
    clock = ManualClock()
    leases = Leases(clock, 10)
    leases.renew("a")
    clock.advance(2)
    assert leases.expired() == []
    clock.advance(100_000)
    assert leases.expired() == []
    clock.advance(4)
    assert leases.expired() == []
    clock.advance(4)
    assert leases.expired() == ["a"]


def test_who_left_is_not_reported() -> None:
    clock = ManualClock()
    leases = Leases(clock, 10)
    leases.renew("a")
    leases.drop("a")
    clock.advance(5)
    clock.advance(5)
    assert leases.expired() == []


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.floats(0, 4)), max_size=60),
)
def test_nobody_expires_before_the_lease_or_later_than_it_and_one_look(
    beats: list[tuple[str, float]],
) -> None:
    clock = ManualClock()
    leases = Leases(clock, 10)
    heard: dict[str, float] = {}
    for name, pause_s in beats:
        clock.advance(pause_s)
        for gone in leases.expired():
            assert clock.now_s() - heard.pop(gone) >= 10
        assert all(clock.now_s() - at < 10 for at in heard.values())
        leases.renew(name)
        heard[name] = clock.now_s()
