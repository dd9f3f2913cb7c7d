from hypothesis import given
from hypothesis import strategies as st

from burnish.schedule.jobs.lending import Lending


def test_a_job_lends_what_it_never_needed_in_a_quiet_time():
    lending = Lending(10.0)
    assert [lending.look("a", 4, 1.1, t) for t in (0.0, 5.0, 9.9)] == [0, 0, 0]
    assert lending.look("a", 4, 1.1, 10.0) == 2


def test_one_busy_look_begins_the_quiet_time_again():
    lending = Lending(10.0)
    lending.look("a", 2, 0.1, 0.0)
    assert lending.look("a", 2, 1.9, 9.0) == 0
    assert lending.look("a", 2, 0.1, 18.0) == 0
    assert lending.look("a", 2, 0.1, 19.0) == 1


def test_all_is_wanted_back_as_soon_as_what_was_kept_is_in_use():
    lending = Lending(10.0)
    for t in (0.0, 10.0):
        lent = lending.look("a", 4, 0.2, t)
    assert lent == 3
    assert lending.look("a", 4, 0.5, 11.0) == 3
    assert lending.look("a", 4, 0.9, 12.0) == 0


def test_who_took_back_at_once_waits_longer_the_next_time():
    lending = Lending(10.0)
    for t in (0.0, 10.0):
        lending.look("a", 2, 0.0, t)
    assert lending.look("a", 2, 1.0, 12.0) == 0
    found = [lending.look("a", 2, 0.0, t) for t in (13.0, 23.0, 33.0, 43.0)]
    assert found == [0, 0, 1, 1]


def test_a_job_of_one_unit_and_one_that_may_not_never_lend():
    for lending, units in ((Lending(1.0), 1), (Lending(0.0), 8)):
        assert [lending.look("a", units, 0.0, float(t)) for t in range(9)] == [0] * 9


def test_what_is_forgotten_starts_anew():
    lending = Lending(10.0)
    lending.look("a", 2, 0.0, 0.0)
    lending.forget("a")
    assert lending.look("a", 2, 0.0, 10.0) == 0


@given(
    st.integers(1, 16),
    st.lists(st.tuples(st.floats(0.0, 20.0), st.floats(0.01, 100.0)), max_size=60),
)
def test_one_unit_stays_and_nothing_is_lent_that_was_needed_lately(units, looks):
    lending, now, before = Lending(30.0), 0.0, 0
    for demand, pause in looks:
        now += pause
        lent = lending.look("a", units, demand, now)
        assert 0 <= lent <= max(units - 1, 0)
        if lent > before:
            assert demand <= units - lent
        before = lent
