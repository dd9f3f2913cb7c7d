"""Which replica takes a request."""

from hypothesis import given
from hypothesis import strategies as st

from burnish.rollout.remote.router import Router

LOADS = st.lists(st.none() | st.integers(0, 200), min_size=1, max_size=6)


@given(LOADS, st.none() | st.sampled_from("abc"))
def test_only_a_replica_that_takes_requests_is_picked(
    loads: list[int | None], session: str | None
) -> None:
    index = Router().pick(loads, session)
    if all(load is None for load in loads):
        assert index is None
    else:
        assert index is not None
        assert loads[index] is not None


@given(LOADS)
def test_without_a_session_the_least_loaded_is_picked(loads: list[int | None]) -> None:
    index = Router().pick(loads, None)
    if index is not None:
        assert loads[index] == min(load for load in loads if load is not None)


@given(st.lists(LOADS, min_size=2, max_size=8))
def test_a_session_leaves_its_replica_only_for_one_with_much_less_to_do(
    history: list[list[int | None]],
) -> None:
    router = Router()
    home = None
    for loads in history:
        index = router.pick(loads, "s")
        if index is None:
            continue
        if home is not None and index != home and home < len(loads):
            load, least = loads[home], min(x for x in loads if x is not None)
            assert load is None or load > 2 * least + 8
        home = index


def test_the_longest_unused_session_is_forgotten() -> None:
    router = Router(max_sessions=2)
    assert router.pick([1, 0], "a") == 1
    router.pick([0, 1], "b")
    router.pick([0, 1], "a")
    router.pick([0, 1], "c")
    assert router.pick([0, 1], "a") == 1
    assert router.pick([1, 0], "b") == 1
