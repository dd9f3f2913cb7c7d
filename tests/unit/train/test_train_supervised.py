import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from burnish.train.supervised import SftExample, supervised_sequences

OPENING = tuple(range(40))


def example(opening, question, answer):
    ids = (*opening, *question, *answer)
    prompt = len(opening) + len(question)
    return SftExample(ids, [i >= prompt for i in range(len(ids))])


tails = st.lists(st.integers(100, 103), min_size=1, max_size=4)


@given(st.lists(st.tuples(st.sampled_from([16, 30, 40]), tails, tails), min_size=1, max_size=12))
@settings(deadline=None)
def test_a_shared_prefix_is_equal_in_its_group_and_ends_before_every_target(parts):
    examples = [example(OPENING[:n], question, answer) for n, question, answer in parts]
    sequences = supervised_sequences(examples)
    assert [s.token_ids for s in sequences] == [tuple(e.token_ids) for e in examples]
    groups = {}
    for sequence in sequences:
        groups.setdefault(sequence.prefix_group, []).append(sequence)
        assert not any(sequence.loss_mask[: sequence.num_prefix_tokens])
        assert sequence.num_prefix_tokens < len(sequence.token_ids)
    for members in groups.values():
        assert len({s.token_ids[: s.num_prefix_tokens] for s in members}) == 1


def test_examples_with_a_common_opening_share_all_of_it():
    examples = [example(OPENING, [100 + i], [7]) for i in range(3)]
    sequences = supervised_sequences(examples)
    assert {(s.prefix_group, s.num_prefix_tokens) for s in sequences} == {("supervised 0", 40)}


def test_sharing_the_opening_changes_no_gradient():
    from burnish.model.config import ModelConfig
    from burnish.model.decoder import Decoder
    from burnish.train.config import TrainConfig
    from burnish.train.trainer import Trainer

    config = ModelConfig(
        family="llama",
        vocab_size=128,
        hidden_size=32,
        intermediate_size=48,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        max_position_embeddings=128,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        tie_word_embeddings=True,
    )
    examples = [example(OPENING, [100 + i], [7, i]) for i in range(4)]
    steps = []
    for batches in ([examples], [[e] for e in examples]):
        torch.manual_seed(0)
        trainer = Trainer(TrainConfig(dtype="float32", warmup_steps=0), Decoder(config))
        logprobs = [x for b in batches for x in trainer.logprobs(supervised_sequences(b))]
        steps.append(torch.tensor(logprobs))
    torch.testing.assert_close(steps[0], steps[1], atol=1e-5, rtol=0)
