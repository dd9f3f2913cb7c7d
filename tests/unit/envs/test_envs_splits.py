from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from burnish.core.vocabulary import Split
from burnish.envs.splits import HELD_OUT_PERCENT, RANGE, TRIES, pick, split_of


@given(st.text())
def test_content_belongs_to_exactly_one_split_always(text):
    assert split_of(text) is split_of(text)


FROZEN = ["held_out", "train", "train", "train", "train", "train", "train", "train"]


def test_membership_never_changes_between_versions():
    # Frozen: a change here would move items that were trained on into the held-out pool.
    assert [split_of(f"question {n}").value for n in range(8)] == FROZEN


def test_share_of_held_out_content_is_as_declared():
    counts = Counter(split_of(f"item {n}") for n in range(20_000))
    assert counts[Split.HELD_OUT] / 20_000 == pytest.approx(HELD_OUT_PERCENT / 100, abs=0.015)


def test_a_tiny_generator_repeats_within_a_split_but_never_across():
    def draw(position: int) -> str:
        return f"item {position % 37}"

    pools = {split: {pick(split, i, draw, str) for i in range(500)} for split in Split}
    assert not pools[Split.TRAIN] & pools[Split.HELD_OUT]


def test_shifted_streams_share_no_item():
    # The trap of seeds N and N+1 being the same data: two streams that overlap almost wholly.
    pools = {
        split: {
            pick(split, i, lambda p, shift=shift: str((p + shift) % 5000), str) for i in range(800)
        }
        for split, shift in ((Split.TRAIN, 0), (Split.HELD_OUT, 1))
    }
    assert not pools[Split.TRAIN] & pools[Split.HELD_OUT]


def test_splits_read_disjoint_ranges_of_positions():
    seen: dict[Split, list[int]] = {split: [] for split in Split}
    for split in Split:
        for index in (0, 5, RANGE // TRIES - 1):
            seen[split].append(pick(split, index, lambda p: p, str))
    assert max(seen[Split.TRAIN]) < RANGE <= min(seen[Split.HELD_OUT])


def test_a_generator_without_items_for_a_split_says_so():
    owner = split_of("only")
    other = next(split for split in Split if split is not owner)
    assert pick(owner, 0, lambda _: "only", str) == "only"
    with pytest.raises(LookupError, match="too few distinct items"):
        pick(other, 0, lambda _: "only", str)


@pytest.mark.parametrize("index", [-1, RANGE // TRIES])
def test_index_out_of_range_is_refused(index):
    with pytest.raises(ValueError, match="index"):
        pick(Split.TRAIN, index, str, str)
