"""The exact forward has its own kernels and the same gradient."""

from collections.abc import Iterator

import pytest
import torch

from burnish.core.records import TrainSequence
from burnish.model.config import ModelConfig
from burnish.model.decoder import Decoder
from burnish.model.kernels.library import kernels
from burnish.train.config import TrainConfig
from burnish.train.exact.attention import segments_of
from burnish.train.layout import lay_out
from burnish.train.packing import pack
from burnish.train.trainer import Trainer

FAMILIES = {
    "llama": {"tie_word_embeddings": True},
    "qwen2": {"qkv_bias": True, "tie_word_embeddings": False},
    "qwen3": {"qk_norm": True, "tie_word_embeddings": True},
    "mistral": {"sliding_window": 6, "tie_word_embeddings": True},
}
needs_kernels = pytest.mark.skipif(kernels().library is None, reason=str(kernels().problem))


def decoder(family: str) -> Decoder:
    torch.manual_seed(0)
    config = ModelConfig(
        family=family,
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        rms_norm_eps=1e-5,
        rope_theta=10_000.0,
        **FAMILIES[family],
    )
    model = Decoder(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def sequences(num_groups: int = 3) -> list[TrainSequence]:
    g = torch.Generator().manual_seed(0)
    found = []
    for group in range(num_groups):
        prefix = torch.randint(0, 61, (7 + 13 * group,), generator=g).tolist()
        for member in range(3):
            ids = prefix + torch.randint(0, 61, (4 + 9 * member,), generator=g).tolist()
            mask = [i >= len(prefix) for i in range(len(ids))]
            found.append(
                TrainSequence(
                    token_ids=tuple(ids),
                    loss_mask=tuple(mask),
                    logprobs=tuple(-4.0 * m for m in mask),
                    advantages=tuple((member - 1.0) * m for m in mask),
                    prefix_group=f"g{group}",
                    num_prefix_tokens=len(prefix),
                    domain="d",
                )
            )
    return found


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@needs_kernels
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_those_of_the_plain_forward(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {}
    for name, config in {
        "exact": TrainConfig(exact=True),
        "plain": TrainConfig(),
        "fp32": TrainConfig(dtype="float32"),
    }.items():
        trainer = Trainer(config, decoder(family))
        monkeypatch.setattr(trainer._masters, "step", lambda _: 0.0)
        trainer.step(sequences())
        masters = trainer._masters._masters
        found[name] = {k: m.grad.clone() for k, m in masters.items() if m.grad is not None}
    assert found["exact"].keys() == found["plain"].keys()
    for key, truth in found["fp32"].items():
        # Both are bf16: neither may be further from the fp32 gradient than bf16 makes the other.
        error = {n: (found[n][key] - truth).norm() / truth.norm() for n in ("exact", "plain")}
        assert error["exact"] <= 1.5 * error["plain"] + 2**-8, (key, error)


@needs_kernels
def test_log_probs_differ_from_the_plain_forward_by_rounding_only() -> None:
    exact = Trainer(TrainConfig(exact=True), decoder("llama")).logprobs(sequences())
    plain = Trainer(TrainConfig(), decoder("llama")).logprobs(sequences())
    truth = Trainer(TrainConfig(dtype="float32"), decoder("llama")).logprobs(sequences())
    flat = [torch.tensor([x for row in rows for x in row]) for rows in (exact, plain, truth)]
    assert (flat[0] - flat[2]).abs().mean() <= 1.5 * (flat[1] - flat[2]).abs().mean()


@needs_kernels
def test_how_sequences_are_packed_changes_no_bit() -> None:
    results = []
    for tokens in (64, 100, 2048):
        trainer = Trainer(TrainConfig(exact=True, micro_batch_tokens=tokens), decoder("llama"))
        results.append(trainer.logprobs(sequences()))
    assert results[0] == results[1] == results[2]


@needs_kernels
def test_a_reference_model_goes_the_same_way_so_that_its_divergence_starts_at_zero() -> None:
    config = TrainConfig.model_validate({"exact": True, "loss": {"kl_coefficient": 0.1}})
    reference = decoder("llama").to(torch.bfloat16).requires_grad_(requires_grad=False)
    trainer = Trainer(config, decoder("llama"))
    assert trainer.step(sequences(), kl_reference=reference).kl_reference == 0.0
    assert trainer.step(sequences(), kl_reference=reference).kl_reference > 0.0


def test_segments_of_a_block_are_its_real_rows() -> None:
    chosen = sequences()
    (one,) = pack(chosen, 4096)
    layout = lay_out(chosen, one)
    for block in layout.blocks:
        rows = [
            row
            for segment in segments_of(block)
            for row in range(segment.start, segment.start + segment.length)
        ]
        assert rows == block.rows_M.tolist()
