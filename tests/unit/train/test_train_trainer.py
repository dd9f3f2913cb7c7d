"""The optimizer step on tiny models, against a plain forward over whole sequences."""

import math

import msgspec
import pytest
import torch
from torch import Tensor

from burnish.core.errors import ClassifiedFailure, UserError
from burnish.core.records import TrainSequence
from burnish.core.vocabulary import FailureKind
from burnish.model.attention import forward_dense
from burnish.model.config import ModelConfig
from burnish.model.decoder import Decoder
from burnish.train.config import LossConfig, TrainConfig
from burnish.train.head import target_logprobs
from burnish.train.losses import policy_loss
from burnish.train.optimizer import learning_rate
from burnish.train.trainer import SftExample, Trainer, TrainerState

FAMILIES = {
    "llama": {"tie_word_embeddings": True},
    "qwen2": {"qkv_bias": True},
    "qwen3": {"qk_norm": True},
    "mistral": {"sliding_window": 6},
}


def decoder(family: str = "llama", seed: int = 0, **changes: object) -> Decoder:
    torch.manual_seed(seed)
    fields = {
        "vocab_size": 61,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        **FAMILIES[family],
        **changes,
    }
    model = Decoder(ModelConfig(family=family, **fields))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model


def step_sequences(seed: int = 0, num_groups: int = 3) -> list[TrainSequence]:
    g = torch.Generator().manual_seed(seed)

    def ids(n: int) -> list[int]:
        return torch.randint(0, 61, (n,), generator=g).tolist()

    found = []
    for group in range(num_groups):
        prefix = ids(4 + 3 * group)
        for length in (3, 9, 5, 14):
            tokens = prefix + ids(length)
            mask = [i >= len(prefix) and i % 5 != 0 for i in range(len(tokens))]
            noise = torch.randn(2, len(tokens), generator=g).tolist()
            found.append(
                TrainSequence(
                    token_ids=tuple(tokens),
                    loss_mask=tuple(mask),
                    logprobs=tuple(
                        -4.0 + x if m else 0.0 for m, x in zip(mask, noise[0], strict=True)
                    ),
                    advantages=tuple(x if m else 0.0 for m, x in zip(mask, noise[1], strict=True)),
                    prefix_group=str(group),
                    num_prefix_tokens=len(prefix),
                    domain="d",
                )
            )
    return found


# Micro-batches below what a run may set, so that a handful of short rollouts already needs some.
FP32 = TrainConfig(dtype="float32", lr=1e-2, warmup_steps=0, max_grad_norm=1e9).model_copy(
    update={"micro_batch_tokens": 40}
)


def plain_gradients(
    model: Decoder, sequences: list[TrainSequence], config: LossConfig
) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients by autograd through a dense forward of each whole sequence."""
    total = sum(sum(s.loss_mask) for s in sequences)
    loss = torch.zeros(())
    for s in sequences:
        logp = torch.log_softmax(forward_dense(model, s.token_ids)[:-1], -1)
        index = [t for t, m in enumerate(s.loss_mask) if m]
        chosen = logp[[t - 1 for t in index], [s.token_ids[t] for t in index]]
        behaviour = torch.tensor([s.logprobs[t] for t in index])
        advantage = torch.tensor([s.advantages[t] for t in index])
        loss = loss + policy_loss(config, chosen, behaviour, advantage).loss_N.sum() / total
    names, parameters = zip(*model.named_parameters(), strict=True)
    return loss.item(), dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))


def packed_gradients(trainer: Trainer, sequences: list[TrainSequence]) -> dict[str, Tensor]:
    """Gradients read back from the first moment of one step: exp_avg = (1 - beta1) g."""
    trainer.step(sequences)
    scale = 1 - trainer.config.adam_beta1
    tensors = trainer.state_dict().tensors
    return {n.removeprefix("exp_avg."): t / scale for n, t in tensors.items() if "exp_avg." in n}


@pytest.mark.parametrize("algorithm", ["cispo", "ppo"])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_packed_gradients_equal_those_of_a_plain_forward(family, algorithm):
    loss = LossConfig(algorithm=algorithm)
    sequences = step_sequences()
    wanted_loss, wanted = plain_gradients(decoder(family), sequences, loss)
    trainer = Trainer(FP32.model_copy(update={"loss": loss}), decoder(family))
    found = packed_gradients(trainer, sequences)
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        assert torch.allclose(found[name], gradient, atol=1e-5, rtol=1e-4), name
    fresh = Trainer(FP32.model_copy(update={"loss": loss}), decoder(family))
    assert fresh.step(sequences).loss == pytest.approx(wanted_loss, abs=1e-5)


@pytest.mark.parametrize("budget", [15, 60, 10_000])
def test_the_step_does_not_depend_on_how_it_is_cut(budget):
    whole = Trainer(FP32.model_copy(update={"micro_batch_tokens": 200}), decoder())
    cut = Trainer(FP32.model_copy(update={"micro_batch_tokens": budget}), decoder())
    first, second = whole.step(step_sequences()), cut.step(step_sequences())
    for name in ("loss", "grad_norm", "entropy", "ratio_mean", "ess_ratio", "clip_ratio"):
        assert getattr(first, name) == pytest.approx(getattr(second, name), rel=1e-5), name


def test_activation_checkpointing_changes_nothing():
    plain = Trainer(FP32, decoder())
    saving = Trainer(FP32.model_copy(update={"checkpoint_activations": True}), decoder())
    plain.step(step_sequences())
    saving.step(step_sequences())
    for name, tensor in plain.weights(torch.float32).items():
        assert torch.equal(tensor, saving.weights(torch.float32)[name]), name


def test_equal_runs_give_equal_bits():
    first, second = (Trainer(TrainConfig(lr=1e-3), decoder()) for _ in range(2))
    for seed in range(3):
        first.step(step_sequences(seed))
        second.step(step_sequences(seed))
    for name, tensor in first.state_dict().tensors.items():
        assert torch.equal(tensor, second.state_dict().tensors[name]), name


def test_a_resumed_trainer_goes_on_bit_for_bit():
    config = TrainConfig(lr=1e-3, schedule="linear", schedule_steps=5, weight_decay=0.1)
    whole = Trainer(config, decoder())
    whole.step(step_sequences(0))
    saved = whole.state_dict()
    state = TrainerState({n: t.clone() for n, t in saved.tensors.items()}, dict(saved.scalars))
    resumed = Trainer(config, decoder(seed=9))
    resumed.load_state_dict(state)
    for seed in (1, 2):
        assert whole.step(step_sequences(seed)).loss == resumed.step(step_sequences(seed)).loss
    for name, tensor in whole.state_dict().tensors.items():
        assert torch.equal(tensor, resumed.state_dict().tensors[name]), name


def test_a_state_before_the_first_step_can_be_resumed():
    whole, resumed = Trainer(FP32, decoder()), Trainer(FP32, decoder(seed=9))
    resumed.load_state_dict(whole.state_dict())
    assert whole.step(step_sequences()).loss == resumed.step(step_sequences()).loss


def test_state_of_another_model_is_refused_and_changes_nothing():
    trainer = Trainer(FP32, decoder())
    before = trainer.weights(torch.float32)
    other = Trainer(FP32, decoder(hidden_size=16)).state_dict()
    with pytest.raises(UserError, match="resume with the model"):
        trainer.load_state_dict(other)
    assert all(torch.equal(before[n], t) for n, t in trainer.weights(torch.float32).items())


def test_masters_keep_updates_that_bf16_would_lose():
    trainer = Trainer(TrainConfig(lr=1e-6, warmup_steps=0), decoder())
    before = trainer.weights(torch.float32)
    trainer.step(step_sequences())
    moved = [(t != before[n]).float().mean() for n, t in trainer.weights(torch.float32).items()]
    assert min(moved) > 0.5


def test_published_weights_are_what_the_trainer_computes_with_and_a_copy():
    trainer = Trainer(TrainConfig(lr=1e-2), decoder())
    trainer.step(step_sequences())
    published = trainer.weights()
    state = trainer.decoder.state_dict()
    assert published.keys() == state.keys()
    assert all(torch.equal(published[n], t) for n, t in state.items())
    frozen = {n: t.clone() for n, t in published.items()}
    trainer.step(step_sequences(1))
    assert all(torch.equal(published[n], t) for n, t in frozen.items())


def poison(sequence: TrainSequence, stream: str, value: float) -> TrainSequence:
    values = list(getattr(sequence, stream))
    values[sequence.loss_mask.index(True)] = value
    return msgspec.structs.replace(sequence, **{stream: tuple(values)})


@pytest.mark.parametrize("stream", ["logprobs", "advantages"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_streams_that_are_not_finite_are_refused(stream, value):
    trainer = Trainer(FP32, decoder())
    sequences = step_sequences()
    sequences[5] = poison(sequences[5], stream, value)
    refuses(trainer, sequences, FailureKind.DATA)


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e38])
def test_a_loss_or_gradient_that_is_not_finite_is_refused(value):
    """Weights gone bad (or an advantage that overflows the gradient) must not reach AdamW."""
    model = decoder()
    sequences = step_sequences()
    if value == 1e38:
        sequences[5] = poison(sequences[5], "advantages", value)
        sequences[5] = poison(sequences[5], "logprobs", -30.0)
    else:
        with torch.no_grad():
            model.embedding.weight[sequences[0].token_ids[0], 0] = value
    refuses(Trainer(FP32, model), sequences, FailureKind.INFRA)


def refuses(trainer: Trainer, sequences: list[TrainSequence], kind: FailureKind) -> None:
    """The step raises `kind`, changes no bit, and leaves no gradient behind."""
    before = {n: t.clone() for n, t in trainer.state_dict().tensors.items()}
    with pytest.raises(ClassifiedFailure) as caught:
        trainer.step(sequences)
    assert caught.value.failure.kind is kind
    after = trainer.state_dict().tensors
    assert before.keys() == after.keys()
    bits = {n: t.view(torch.int32) for n, t in before.items()}
    assert all(torch.equal(t, after[n].view(torch.int32)) for n, t in bits.items())
    assert trainer.num_steps == 0
    assert all(p.grad is None for p in trainer.decoder.parameters())


def test_a_step_after_a_refused_one_is_as_if_that_had_not_been():
    refused, clean = Trainer(FP32, decoder()), Trainer(FP32, decoder())
    sequences = step_sequences()
    bad = [*sequences[:-1], poison(sequences[-1], "advantages", 3e38)]
    bad[-1] = poison(bad[-1], "logprobs", -30.0)
    with pytest.raises(ClassifiedFailure):
        refused.step(bad)
    assert refused.step(sequences).grad_norm == clean.step(sequences).grad_norm


@pytest.mark.parametrize("sequences", [[], [SftExample((1, 2), (True, False))]])
def test_a_step_without_targets_is_refused(sequences):
    with pytest.raises(ClassifiedFailure, match="no target token"):
        Trainer(FP32, decoder()).sft_step(sequences)


def test_ratio_is_one_when_the_behaviour_is_the_policy():
    trainer = Trainer(FP32, decoder())
    sequences = step_sequences()
    found = trainer.logprobs(sequences)
    exact = [with_logprobs(s, f) for s, f in zip(sequences, found, strict=True)]
    metrics = trainer.step(exact)
    assert metrics.ratio_mean == pytest.approx(1.0, abs=1e-6)
    assert metrics.ratio_max == pytest.approx(1.0, abs=1e-6)
    assert abs(metrics.kl_behaviour_k1) < 1e-6
    assert metrics.ess_ratio == pytest.approx(1.0, abs=1e-6)


def test_score_equals_the_dense_forward():
    model = decoder("qwen3")
    ids = step_sequences()[-1].token_ids
    logp = torch.log_softmax(forward_dense(model, ids)[:-1], -1)
    wanted = logp.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    found = Trainer(FP32, model).score(ids)
    assert found[0] == 0.0
    assert torch.allclose(torch.tensor(found[1:]), wanted, atol=1e-5)


def test_metrics_count_shared_prompts_once_only_where_they_are_stored_once():
    sequences = step_sequences(num_groups=1)
    metrics = Trainer(FP32.model_copy(update={"micro_batch_tokens": 999}), decoder()).step(
        sequences
    )
    assert metrics.num_tokens == sum(len(s.token_ids) for s in sequences)
    assert metrics.num_stored_tokens == metrics.num_tokens - 3 * 4
    assert metrics.num_target_tokens == sum(sum(s.loss_mask) for s in sequences)


def test_kl_to_the_reference_pulls_back_to_it():
    config = FP32.model_copy(
        update={"loss": LossConfig(kl_coefficient=1.0), "lr": 3e-3, "micro_batch_tokens": 80}
    )
    reference, trainer = decoder(seed=1), Trainer(config, decoder(seed=0))
    sequences = [without_advantage(s) for s in step_sequences()]
    seen = []
    for _ in range(12):
        exact = [
            with_logprobs(s, found)
            for s, found in zip(sequences, trainer.logprobs(sequences), strict=True)
        ]
        seen.append(trainer.step(exact, kl_reference=reference).kl_reference)
    assert seen[-1] < 0.7 * seen[0]


def without_advantage(sequence: TrainSequence) -> TrainSequence:
    return msgspec.structs.replace(sequence, advantages=(0.0,) * len(sequence.token_ids))


def with_logprobs(sequence: TrainSequence, found: list[float]) -> TrainSequence:
    stream = iter(found)
    logprobs = tuple(next(stream) if m else 0.0 for m in sequence.loss_mask)
    return msgspec.structs.replace(sequence, logprobs=logprobs)


def test_supervised_steps_learn_their_examples():
    trainer = Trainer(FP32, decoder())
    examples = [SftExample(s.token_ids, s.loss_mask) for s in step_sequences()]
    losses = [trainer.sft_step(examples, lr=2e-2).loss for _ in range(40)]
    assert losses[-1] < 0.3 * losses[0]


def test_supervised_loss_is_the_mean_over_tokens_of_the_whole_step():
    model = decoder()
    sequences = step_sequences()
    logp = Trainer(FP32, decoder()).logprobs(sequences)
    flat = [x for one in logp for x in one]
    examples = [SftExample(s.token_ids, s.loss_mask) for s in sequences]
    assert Trainer(FP32, model).sft_step(examples).loss == pytest.approx(
        -sum(flat) / len(flat), abs=1e-5
    )


def test_head_equals_log_softmax_with_temperature_and_its_gradients():
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(9, 16, generator=g).requires_grad_()
    weight = torch.randn(50, 16, generator=g).requires_grad_()
    targets = torch.randint(0, 50, (9,), generator=g)
    out = target_logprobs(hidden, weight, targets, temperature=0.7)
    logp = torch.log_softmax(hidden @ weight.T / 0.7, -1)
    wanted = logp[torch.arange(9), targets]
    assert torch.allclose(out.logp_N, wanted, atol=1e-5)
    assert torch.allclose(out.entropy_N, -(logp.exp() * logp).sum(-1), atol=1e-5)
    mix = torch.randn(9, generator=g)
    for a, b in zip(
        torch.autograd.grad((out.logp_N * mix).sum(), (hidden, weight)),
        torch.autograd.grad((wanted * mix).sum(), (hidden, weight)),
        strict=True,
    ):
        assert torch.allclose(a, b, atol=1e-5)


def test_a_nearly_certain_token_keeps_its_small_gradient_in_bf16():
    """1 - p for p = 0.9995 is lost if p is rounded to 8 bits first."""
    weight = torch.zeros(4, 8, dtype=torch.bfloat16)
    weight[0, 0] = 1.0
    hidden = torch.zeros(1, 8, dtype=torch.bfloat16)
    hidden[0, 0] = 8.7
    hidden.requires_grad_()
    out = target_logprobs(hidden, weight, torch.tensor([0]))
    (found,) = torch.autograd.grad(out.logp_N.sum(), hidden)
    wanted = 1 - math.exp(out.logp_N.item())
    assert found[0, 0].item() == pytest.approx(wanted, rel=2**-7)


def test_learning_rate_warms_up_and_falls_linearly():
    config = TrainConfig(lr=1.0, warmup_steps=4, schedule="linear", schedule_steps=10)
    rates = [learning_rate(config, step, 1.0) for step in range(1, 12)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[4] == 1.0
    assert rates[9] == pytest.approx(1 / 6)
    assert rates[10] == 0.0
    constant = config.model_copy(update={"schedule": "constant"})
    assert learning_rate(constant, 1000, 3.0) == 3.0


def test_clipping_bounds_the_norm_but_reports_the_true_one():
    loose = Trainer(FP32, decoder())
    tight = Trainer(FP32.model_copy(update={"max_grad_norm": 1e-3}), decoder())
    wide = packed_gradients(loose, step_sequences())
    small = packed_gradients(tight, step_sequences())
    norm = math.sqrt(sum(t.square().sum().item() for t in wide.values()))
    assert math.sqrt(sum(t.square().sum().item() for t in small.values())) == pytest.approx(1e-3)
    assert tight.step(step_sequences(1)).grad_norm > 1e-3
    assert Trainer(FP32, decoder()).step(step_sequences()).grad_norm == pytest.approx(
        norm, rel=1e-4
    )
