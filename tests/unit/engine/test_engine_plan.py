"""The plan of a step, from counts alone."""

from hypothesis import given
from hypothesis import strategies as st

from burnish.rollout.engine.cache.buckets import bucket_rows
from burnish.rollout.engine.plan import Chunk, Load, may_admit, may_swap, plan_step

SIZE = 4


def held(computed: int, pending: int) -> Load:
    return Load(pending, computed, -(-computed // SIZE))


def test_decodes_come_first_and_prompts_fill_what_is_left() -> None:
    plan = plan_step([held(0, 10), held(8, 1)], room=9, budget_tokens=6, page_size=SIZE)
    assert plan.chunks == (Chunk(1, 1, 1), Chunk(0, 5, 2))
    assert not plan.is_short


def test_a_long_prompt_leaves_half_of_the_budget_to_those_behind_it() -> None:
    def shares(*pending: int) -> list[int]:
        running = [held(0, n) for n in pending]
        plan = plan_step(running, room=99, budget_tokens=20, page_size=SIZE)
        return [tokens for _, tokens in sorted((c.position, c.num_tokens) for c in plan.chunks)]

    assert shares(90) == [20]
    assert shares(90, 90, 90) == [10, 10]
    assert shares(90, 4, 3) == [13, 4, 3]
    assert shares(1, 90, 4) == [1, 15, 4]


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


def test_pages_are_swapped_where_that_is_cheaper_and_there_is_room() -> None:
    def swap(num_tokens: int, flops_per_token: float, room_bytes: int = 10**9) -> bool:
        return may_swap(
            num_tokens=num_tokens,
            num_bytes=1_000_000,
            flops_per_token=flops_per_token,
            room_bytes=room_bytes,
        )

    # Moving a megabyte out and back is worth 40 MFLOP.
    assert swap(16, 2.7e8)
    assert not swap(16, 2.7e8, room_bytes=999_999)
    assert swap(100, 0.41e6)
    assert not swap(100, 0.39e6)


@given(st.lists(st.integers(1, 500), max_size=60))
def test_buckets_hold_every_row_once(counts: list[int]) -> None:
    buckets = bucket_rows(counts)
    assert sorted(i for bucket in buckets for i in bucket) == list(range(len(counts)))
    padded = sum(max(counts[i] for i in bucket) * len(bucket) for bucket in buckets)
    assert padded <= max(counts, default=0) * len(counts)


def test_one_long_row_does_not_pad_many_short_ones() -> None:
    assert bucket_rows([2] * 30 + [100]) == [[30], list(range(30))]
    assert bucket_rows([2, 3, 4]) == [[0, 1, 2]]
