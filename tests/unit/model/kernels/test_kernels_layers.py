"""Whole layers and what outlives a step: threads change no bits, memory is kept."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from burnish.model.config import ModelConfig
from burnish.model.decoder import Decoder
from burnish.model.kernels.attention import PagedLayer, PageKind, PageShape
from burnish.model.kernels.library import Isa
from burnish.model.kernels.matrix import MOST_INPUTS, PackedMatrix
from burnish.model.kernels.memory import lazy_zeros
from burnish.model.kernels.native_decoder import NativeDecoder, native_problem


@pytest.fixture
def set_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def config_of(*, qk_norm: bool, intermediate_size: int = 112) -> ModelConfig:
    return ModelConfig(
        family="qwen3" if qk_norm else "llama",
        vocab_size=300,
        hidden_size=80,
        intermediate_size=intermediate_size,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        max_position_embeddings=64,
        rms_norm_eps=1e-5,
        rope_theta=1e4,
        tie_word_embeddings=True,
        qk_norm=qk_norm,
    )


def decoder_of(*, qk_norm: bool) -> NativeDecoder:
    config = config_of(qk_norm=qk_norm)
    torch.manual_seed(0)
    decoder = Decoder(config)
    return NativeDecoder(config, decoder.state_dict())


def hidden(model: NativeDecoder, rows: int) -> Tensor:
    ids, positions = torch.arange(rows) % 300, torch.arange(rows) % 64
    return model.hidden(ids, positions, lambda _layer, q, k, v: q + k.repeat(1, 2, 1) * v.mean())


@pytest.mark.parametrize(("width", "problem"), [(111, "odd"), (MOST_INPUTS + 2, "over 131,072")])
@pytest.mark.usefixtures("isa")
def test_widths_that_the_products_cannot_take_are_named(width: int, problem: str) -> None:
    assert native_problem(config_of(qk_norm=False)) is None
    found = native_problem(config_of(qk_norm=False, intermediate_size=width))
    assert found is not None
    assert problem in found


@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 5, 70])
@pytest.mark.usefixtures("set_threads")
def test_layers_have_the_same_bits_with_any_number_of_threads(
    isa: Isa, rows: int, *, qk_norm: bool
) -> None:
    model = decoder_of(qk_norm=qk_norm)
    torch.set_num_threads(1)
    alone = hidden(model, rows)
    assert torch.isfinite(alone).all()
    for threads in (2, 3, 7):
        torch.set_num_threads(threads)
        for _ in range(5):
            assert torch.equal(hidden(model, rows), alone)


@pytest.mark.parametrize("outputs", [16, 64, 100, 256])
def test_panels_finished_whole_have_the_bits_of_those_finished_one_by_one(
    isa: Isa, outputs: int
) -> None:
    generator = torch.Generator().manual_seed(outputs)
    x = torch.randn(13, 34, generator=generator).bfloat16()
    weight = torch.randn(2 * outputs, 34, generator=generator)
    # A bias, be it zero, takes the other way.
    for gated in (False, True):
        plain = PackedMatrix(weight, gated=gated)
        other = PackedMatrix(weight, torch.zeros(2 * outputs), gated=gated)
        if gated:
            assert torch.equal(plain.gated(x), other.gated(x))
        else:
            assert torch.equal(plain.linear(x), other.linear(x))
            assert torch.equal(plain.linear_fp32(x), other.linear_fp32(x))


def test_logits_keep_their_memory_and_their_numbers(isa: Isa) -> None:
    model = decoder_of(qk_norm=False)
    rows = hidden(model, 70)
    expected = model.logits(rows).clone()
    first = model.logits(rows)
    assert torch.equal(model.logits(rows[3:9]), expected[3:9])
    again = model.logits(rows)
    assert again.data_ptr() == first.data_ptr()
    assert torch.equal(again, expected)


@pytest.mark.parametrize("kind", list(PageKind))
@pytest.mark.usefixtures("set_threads")
def test_threads_fill_pages_with_the_bytes_of_one(isa: Isa, kind: PageKind) -> None:
    shape = PageShape(kind, 16, 2, 32)
    # Chunks that begin and end within pages, and single tokens between them.
    slots = [*range(5, 150), 163, *range(176, 177), *range(207, 350), 367, 399]
    generator = torch.Generator().manual_seed(0)
    dtype = torch.float32 if kind is PageKind.F32 else torch.bfloat16
    k, v = (torch.randn(len(slots), 2, 32, generator=generator).to(dtype) for _ in range(2))
    stored = []
    for threads in (1, 2, 3, 7):
        torch.set_num_threads(threads)
        layer = PagedLayer(shape, 25, with_bounds=True)
        layer.write(torch.tensor(slots), k, v)
        assert layer.bounds is not None
        stored.append((layer.data.clone(), layer.bounds.clone()))
    for data, bounds in stored[1:]:
        assert torch.equal(data, stored[0][0])
        assert torch.equal(bounds, stored[0][1])


def test_lazy_zeros_are_zeros_of_any_size() -> None:
    assert lazy_zeros(0, 5).shape == (0, 5)
    numbers = lazy_zeros(3, 7, dtype=torch.float32)
    assert numbers.dtype is torch.float32
    assert torch.equal(numbers, torch.zeros(3, 7))
