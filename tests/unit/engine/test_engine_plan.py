"""The plan of a step, from counts alone."""

from hypothesis import given
from hypothesis import strategies as st

from burnish.rollout.engine.cache.buckets import bucket_rows
from burnish.rollout.engine.plan import Chunk, Load, may_admit, plan_step

SIZE = 4


def held(computed: int, pending: int) -> Load:
    return Load(pending, computed, -(-computed // SIZE))


def test_decodes_come_first_and_prompts_fill_what_is_left() -> None:
    plan = plan_step([held(0, 10), held(8, 1)], room=9, budget_tokens=6, page_size=SIZE)
    assert plan.chunks == (Chunk(1, 1, 1), Chunk(0, 5, 2))
    assert not plan.is_short


def test_a_page_shortage_is_reported() -> None:
    plan = plan_step([held(4, 1), held(4, 1)], room=1, budget_tokens=9, page_size=SIZE)
    assert plan.chunks == (Chunk(0, 1, 1),)
    assert plan.is_short


@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(1, 40)), max_size=12),
    st.integers(0, 60),
    st.integers(1, 50),
)
def test_a_plan_stays_within_room_and_budget_and_loses_nobody(
    pairs: list[tuple[int, int]], room: int, budget: int
) -> None:
    running = [held(*pair) for pair in pairs]
    plan = plan_step(running, room=room, budget_tokens=budget, page_size=SIZE)
    assert sum(c.num_tokens for c in plan.chunks) <= budget
    assert sum(c.num_new_pages for c in plan.chunks) <= room
    assert len({c.position for c in plan.chunks}) == len(plan.chunks)
    for chunk in plan.chunks:
        load = running[chunk.position]
        assert 1 <= chunk.num_tokens <= load.num_pending
        end = load.num_computed + chunk.num_tokens
        assert (load.num_pages + chunk.num_new_pages) * SIZE >= end
    sizes = [c.num_tokens == 1 for c in plan.chunks]
    assert sizes == sorted(sizes, reverse=True)
    if running and not plan.is_short:
        used = sum(c.num_tokens for c in plan.chunks)
        assert used == min(budget, sum(load.num_pending for load in running))


def test_admission_leaves_a_page_for_each_running_sequence() -> None:
    def admit(room: int, num_running: int) -> bool:
        return may_admit(
            new_pages=3, locked_pages=1, room=room, num_running=num_running, max_running=4
        )

    assert admit(4, 0)
    assert not admit(4, 1)
    assert admit(5, 1)
    assert not admit(99, 4)


@given(st.lists(st.integers(1, 500), max_size=60))
def test_buckets_hold_every_row_once(counts: list[int]) -> None:
    buckets = bucket_rows(counts)
    assert sorted(i for bucket in buckets for i in bucket) == list(range(len(counts)))
    padded = sum(max(counts[i] for i in bucket) * len(bucket) for bucket in buckets)
    assert padded <= max(counts, default=0) * len(counts)


def test_one_long_row_does_not_pad_many_short_ones() -> None:
    assert bucket_rows([2] * 30 + [100]) == [[30], list(range(30))]
    assert bucket_rows([2, 3, 4]) == [[0, 1, 2]]
