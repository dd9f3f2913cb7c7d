"""Packs: nothing lost, nothing twice, nothing over the budget."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from burnish.core.records import TrainSequence
from burnish.train.layout import lay_out
from burnish.train.packing import pack


def sequence(group: str, prefix: list[int], suffix: list[int], mask: list[bool]) -> TrainSequence:
    ids = (*prefix, *suffix)
    loss = (False, *(bool(m) for m in mask))[: len(ids)]
    loss = loss + (False,) * (len(ids) - len(loss))
    return TrainSequence(
        token_ids=ids,
        loss_mask=loss,
        logprobs=tuple(-float(i) for i in range(len(ids))),
        advantages=tuple(float(i) for i in range(len(ids))),
        prefix_group=group,
        num_prefix_tokens=len(prefix),
        domain="d",
    )


TOKENS = st.integers(0, 50)


@st.composite
def steps(draw) -> list[TrainSequence]:
    found = []
    for group in range(draw(st.integers(1, 4))):
        prefix = draw(st.lists(TOKENS, max_size=8))
        for _ in range(draw(st.integers(1, 5))):
            suffix = draw(st.lists(TOKENS, min_size=0 if prefix else 1, max_size=40))
            mask = draw(st.lists(st.booleans(), max_size=50))
            found.append(sequence(str(group), prefix, suffix, mask))
    return draw(st.permutations(found))


@given(steps(), st.integers(1, 80))
def test_packing_is_a_permutation_within_the_budget(sequences, budget):
    packs = pack(sequences, budget)
    members = [i for p in packs for g in p.groups for i in g.members]
    assert sorted(members) == list(range(len(sequences)))
    for one in packs:
        stored = sum(
            g.num_prefix_tokens
            + sum(len(sequences[i].token_ids) - g.num_prefix_tokens for i in g.members)
            for g in one.groups
        )
        assert stored == one.num_tokens
        alone = [i for g in one.groups for i in g.members]
        assert stored <= budget or len(alone) == 1


@given(steps(), st.integers(1, 80))
def test_every_target_appears_once_behind_the_tokens_before_it(sequences, budget):
    """Walking back over positions from a target's row finds the sequence up to the target."""
    wanted = Counter(
        (i, t, s.token_ids[t], s.logprobs[t], s.advantages[t])
        for i, s in enumerate(sequences)
        for t, masked in enumerate(s.loss_mask)
        if masked
    )
    found: Counter = Counter()
    for one in pack(sequences, budget):
        layout = lay_out(sequences, one)
        for row, token, behaviour, advantage, owner in zip(
            layout.target_rows_N.tolist(),
            layout.target_ids_N.tolist(),
            layout.behaviour_N.tolist(),
            layout.advantage_N.tolist(),
            layout.sequence_N.tolist(),
            strict=True,
        ):
            position = layout.positions_T[row].item()
            assert layout.ids_T[row].item() == sequences[owner].token_ids[position]
            found[(owner, position + 1, token, behaviour, advantage)] += 1
    assert found == wanted


@given(steps(), st.integers(1, 80))
def test_attention_blocks_cover_every_row_once_and_map_padding_to_real_rows(sequences, budget):
    for one in pack(sequences, budget):
        layout = lay_out(sequences, one)
        rows = [r for b in layout.blocks for r in b.rows_M.tolist()]
        assert sorted(rows) == list(range(one.num_tokens))
        for block in layout.blocks:
            assert block.rows_SL.numel() == block.num_segments * block.length
            assert block.rows_SL[block.slots_M].equal(block.rows_M)
            assert block.prefix.start + block.prefix.length <= one.num_tokens


def test_a_shared_prompt_is_stored_once():
    members = [sequence("a", list(range(10)), [i, i + 1], [True]) for i in range(8)]
    (one,) = pack(members, 1000)
    assert one.num_tokens == 10 + 8 * 2


def test_a_sequence_longer_than_the_budget_is_alone_and_whole():
    members = [sequence("a", [1, 2], [3] * n, [True]) for n in (2, 500, 2)]
    sizes = sorted(p.num_tokens for p in pack(members, 20))
    assert sizes == [6, 502]


def test_same_group_name_with_another_prefix_is_kept_apart():
    members = [sequence("a", [1, 2], [3], [True]), sequence("a", [1, 9], [3], [True])]
    (one,) = pack(members, 100)
    assert one.num_tokens == 6
