"""Exact mode: a request's tokens and log-prob bits, whatever happens around it."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from burnish.core.errors import UserError
from burnish.core.records import GenerateRequest, Generation, TrainSequence
from burnish.core.vocabulary import KvDtype
from burnish.model.decoder import Decoder
from burnish.model.kernels import library
from burnish.model.kernels.library import Isa, kernels
from burnish.rollout.engine.engine import CoreLimits, EngineCore
from burnish.rollout.engine.limits import CoreCounters
from burnish.rollout.engine.score import reference_score
from burnish.train.config import TrainConfig
from burnish.train.trainer import Trainer

needs_kernels = pytest.mark.skipif(kernels().library is None, reason=str(kernels().problem))
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"qkv_bias": True, "tie_word_embeddings": False},
    "qwen3": {"qk_norm": True},
    "mistral": {"sliding_window": 24},
}
PROMPT = [(7 * i * i + 3 * i) % 300 for i in range(37)]


@pytest.fixture(params=[isa for isa in Isa if isa is not Isa.TORCH])
def isa(request: pytest.FixtureRequest) -> Any:
    if list(Isa).index(request.param) > list(Isa).index(kernels().isa):
        pytest.skip(f"this CPU has {kernels().isa}")
    with library.restricted(request.param):
        yield request.param


def counted(
    decoder: Decoder, requests: Sequence[GenerateRequest], **limits: Any
) -> tuple[dict[str, Generation], CoreCounters]:
    chosen = {"exact": True, "num_pages": 400, "page_size": 16} | limits
    core = EngineCore(decoder.config, decoder.state_dict(), limits=CoreLimits(**chosen))
    for request in requests:
        core.add(request)
    ended: dict[str, Generation] = {}
    while core.has_work:
        ended |= {g.request_id: g for _, g in core.step()}
    return ended, core.counters


def run(
    decoder: Decoder, requests: Sequence[GenerateRequest], **limits: Any
) -> dict[str, Generation]:
    return counted(decoder, requests, **limits)[0]


def bits(generation: Generation) -> tuple[Sequence[int], Sequence[float]]:
    return generation.token_ids, generation.logprobs


def requests_for(ask: Callable[..., GenerateRequest], count: int) -> list[GenerateRequest]:
    lengths = [37 if i % 3 else 5 + i for i in range(count)]
    return [
        ask(f"r{i}", PROMPT[:n], max_tokens=30, temperature=0.9, seed=i)
        for i, n in enumerate(lengths)
    ]


@needs_kernels
@pytest.mark.parametrize("family", FAMILIES)
def test_batch_chunks_prefix_reuse_and_preemption_change_no_bit(
    family: str, make_decoder: Callable[..., Decoder], request_for: Callable[..., GenerateRequest]
) -> None:
    decoder = make_decoder(**FAMILIES[family])
    requests = requests_for(request_for, 12)
    together, counters = counted(decoder, requests)
    assert counters.cached_tokens > 0
    assert counters.num_preemptions == 0
    tight, counters = counted(decoder, requests, num_pages=20)
    assert counters.num_preemptions > 0
    others = {
        "small chunks": run(decoder, requests, budget_tokens=9),
        "two at a time": run(decoder, requests, max_running=2),
        "pages of 32": run(decoder, requests, page_size=32),
        "too few pages": tight,
    }
    for request in requests:
        wanted = bits(together[request.request_id])
        assert bits(run(decoder, [request])[request.request_id]) == wanted
        for name, ended in others.items():
            assert bits(ended[request.request_id]) == wanted, name


@needs_kernels
def test_one_row_among_many_keeps_its_bits(
    decoder: Decoder, request_for: Callable[..., GenerateRequest]
) -> None:
    first = request_for("first", PROMPT[:9], max_tokens=6, seed=1)
    alone = bits(run(decoder, [first])["first"])
    for count in (1, 2, 5, 6, 7, 31, 64, 128, 256):
        others = [request_for(f"o{i}", PROMPT[i % 20 :], max_tokens=6) for i in range(count)]
        ended = run(decoder, [*others, first], max_running=300, num_pages=2000)
        assert bits(ended["first"]) == alone, count


def sequences_of(ended: dict[str, Generation], requests: Sequence[GenerateRequest]) -> list[Any]:
    found = []
    for request in requests:
        reply, prompt = ended[request.request_id], request.prompt_ids
        shared = len(prompt) == len(PROMPT)
        zeros, sampled = [0.0] * len(prompt), len(reply.token_ids)
        found.append(
            TrainSequence(
                token_ids=(*prompt, *reply.token_ids),
                loss_mask=(*[False] * len(prompt), *[True] * sampled),
                logprobs=(*zeros, *reply.logprobs),
                advantages=(*zeros, *[1.0] * sampled),
                prefix_group="shared" if shared else request.request_id,
                num_prefix_tokens=len(prompt),
                domain="d",
            )
        )
    return found


@needs_kernels
@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_trainer_computes_the_bits_that_were_sampled(
    family: str,
    checkpoint: bool,
    isa: Isa,
    make_decoder: Callable[..., Decoder],
    request_for: Callable[..., GenerateRequest],
) -> None:
    decoder = make_decoder(**FAMILIES[family])
    requests = requests_for(request_for, 7)
    sequences = sequences_of(run(decoder, requests), requests)
    config = TrainConfig(exact=True, micro_batch_tokens=128, checkpoint_activations=checkpoint)
    trainer = Trainer(config, decoder, temperature=0.9)
    for sequence, scored in zip(sequences, trainer.logprobs(sequences), strict=True):
        sampled = [x for x, m in zip(sequence.logprobs, sequence.loss_mask, strict=True) if m]
        assert torch.tensor(sampled).tolist() == scored
    step = trainer.step(sequences)
    assert (step.kl_behaviour_k1, step.ratio_mean, step.ratio_max) == (0.0, 1.0, 1.0)
    # The step changed the weights: the packed copies have to follow them.
    after = run_served(trainer, decoder, requests)
    step = trainer.step(sequences_of(after, requests))
    assert (step.kl_behaviour_k1, step.ratio_max) == (0.0, 1.0)


def run_served(
    trainer: Trainer, decoder: Decoder, requests: Sequence[GenerateRequest]
) -> dict[str, Generation]:
    served = Decoder(decoder.config)
    served.load_state_dict(trainer.weights(torch.float32))
    return run(served, requests)


@needs_kernels
def test_the_canary_of_an_exact_engine_is_bit_equal_and_that_of_the_sampled_log_probs(
    decoder: Decoder, request_for: Callable[..., GenerateRequest]
) -> None:
    request = request_for("r", PROMPT, max_tokens=40, seed=3)
    reply = run(decoder, [request])["r"]
    core = EngineCore(decoder.config, decoder.state_dict(), limits=CoreLimits(exact=True))
    tokens = (*PROMPT, *reply.token_ids)
    assert core.score(tokens) == reference_score(decoder, tokens, torch.bfloat16, exact=True)
    assert core.score(tokens)[len(PROMPT) :] == tuple(reply.logprobs)


@needs_kernels
def test_quantised_keys_are_refused_as_the_trainer_has_none(decoder: Decoder) -> None:
    limits = CoreLimits(exact=True, kv_dtype=KvDtype.INT8)
    with pytest.raises(UserError, match="int8"):
        EngineCore(decoder.config, decoder.state_dict(), limits=limits)


def test_what_cannot_be_exact_is_refused_with_the_fix(make_decoder: Callable[..., Decoder]) -> None:
    limits = CoreLimits(exact=True)
    decoder = make_decoder()
    with pytest.raises(UserError, match="bfloat16"):
        EngineCore(decoder.config, decoder.state_dict(), dtype=torch.float32, limits=limits)
    with library.restricted(Isa.TORCH), pytest.raises(UserError, match="native kernels"):
        EngineCore(decoder.config, decoder.state_dict(), limits=limits)
    with pytest.raises(UserError, match="exact"):
        Trainer(TrainConfig(exact=True, dtype="float32"), make_decoder())
    narrow = make_decoder(head_dim=8)
    with pytest.raises(UserError, match=r"8 wide|native kernels"):
        EngineCore(narrow.config, narrow.state_dict(), limits=limits)
