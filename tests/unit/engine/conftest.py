"""A tiny random decoder, and a dense fp32 forward that shares no code with the engine."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from burnish.core.records import GenerateRequest, SamplingParams
from burnish.model.config import ModelConfig
from burnish.model.decoder import Decoder
from burnish.rollout.engine.engine import EngineCore

DEADLINE_S = 60.0


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def build(seed: int = 0, **overrides: Any) -> Decoder:
    values: dict[str, Any] = {
        "family": "llama",
        "vocab_size": 300,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_layers": 3,
        "num_heads": 6,
        "num_kv_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e4,
        "tie_word_embeddings": True,
    }
    decoder = Decoder(ModelConfig(**(values | overrides)))
    generator = torch.Generator().manual_seed(seed)
    for parameter in decoder.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, 0, 0.2, generator=generator)
        else:
            torch.nn.init.normal_(parameter, 1, 0.1, generator=generator)
    return decoder.eval()


def dense(decoder: Decoder, ids: list[int]) -> Tensor:
    """Log-softmax of the next token after every position, [T, V], by a full masked softmax."""
    c = decoder.config
    length = len(ids)
    mask = torch.ones(length, length).tril().bool()
    if c.sliding_window is not None:
        mask &= ~torch.ones(length, length).tril(-c.sliding_window).bool()

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (x.repeat_interleave(c.num_heads // c.num_kv_heads, 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * c.head_dim**-0.5
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(~mask, -torch.inf).softmax(-1), v)

    with torch.no_grad():
        hidden = decoder(torch.tensor(ids), torch.arange(length), attend)
        return decoder.logits(hidden).log_softmax(-1)


def ask(request_id: str, prompt: list[int] | tuple[int, ...], **params: Any) -> GenerateRequest:
    return GenerateRequest(
        request_id=request_id, prompt_ids=tuple(prompt), params=SamplingParams(**params)
    )


@pytest.fixture(scope="session")
def make_decoder() -> Callable[..., Decoder]:
    return build


@pytest.fixture(scope="session")
def decoder() -> Decoder:
    return build()


@pytest.fixture(scope="session")
def dense_logprobs() -> Callable[[Decoder, list[int]], Tensor]:
    return dense


@pytest.fixture(scope="session")
def request_for() -> Callable[..., GenerateRequest]:
    return ask


class Gate:
    """Stops the engine's thread inside a step, so that a test can act at a known moment."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, at_step: int) -> None:
        self.reached, self.go = threading.Event(), threading.Event()
        real, count = EngineCore.step, 0

        def step(core: EngineCore) -> Any:
            nonlocal count
            count += core.has_work
            if count == at_step and core.has_work:
                self.reached.set()
                assert self.go.wait(DEADLINE_S)
            return real(core)

        monkeypatch.setattr(EngineCore, "step", step)

    async def wait(self) -> None:
        assert await asyncio.to_thread(self.reached.wait, DEADLINE_S)


@pytest.fixture
def make_gate(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Gate]:
    return lambda at_step: Gate(monkeypatch, at_step)
