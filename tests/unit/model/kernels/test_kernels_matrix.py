import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from burnish.model.kernels.library import Isa
from burnish.model.kernels.matrix import (
    MOST_INPUTS,
    PackedMatrix,
    all_finite,
    gated_reference,
    linear_reference,
)


def _operands(rows: int, inputs: int, outputs: int, seed: int = 0) -> tuple[torch.Tensor, ...]:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, inputs, generator=g).bfloat16()
    weight = (torch.randn(outputs, inputs, generator=g) * inputs**-0.5).bfloat16()
    return x, weight, torch.randn(outputs, generator=g).bfloat16()


@st.composite
def shapes(draw: st.DrawFn) -> tuple[int, int, int, int]:
    size = st.integers(1, 150)
    return draw(st.integers(0, 20)), draw(size), draw(size), draw(st.integers(0, 9))


def test_products_are_those_of_torch_for_any_shape(isa: Isa) -> None:
    @settings(max_examples=60, deadline=None)
    @given(shape=shapes(), biased=st.booleans())
    def check(shape: tuple[int, int, int, int], biased: bool) -> None:
        x, weight, full_bias = _operands(*shape)
        bias = full_bias if biased else None
        packed = PackedMatrix(weight, bias)
        expected = x.double() @ weight.double().T + (bias.double() if biased else 0.0)
        # Products are exact; a chain of n fp32 additions is off by at most n units of 2**-24 of
        # the sum of magnitudes, twice that where pairs are added first.
        size = x.double().abs() @ weight.double().abs().T + full_bias.double().abs()
        bound = size * 2 * (shape[1] + 2) * 2**-24
        assert bool(((packed.linear_fp32(x).double() - expected).abs() <= bound).all())
        torch.testing.assert_close(
            packed.linear(x), linear_reference(x, weight, bias), atol=1e-5, rtol=2**-7
        )

    check()


def test_the_gate_is_that_of_torch_for_any_shape(isa: Isa) -> None:
    @settings(max_examples=40, deadline=None)
    @given(shape=shapes(), biased=st.booleans())
    def check(shape: tuple[int, int, int, int], biased: bool) -> None:
        rows, inputs, outputs, seed = shape
        x, weight, full_bias = _operands(rows, inputs, 2 * outputs, seed)
        bias = full_bias if biased else None
        # Three roundings to bf16 in a row may each fall the other way.
        torch.testing.assert_close(
            PackedMatrix(weight, bias, gated=True).gated(x),
            gated_reference(x, weight, bias),
            atol=1e-5,
            rtol=3 * 2**-7,
        )

    check()


@pytest.mark.parametrize("inputs", [1, 31, 96, 700])
def test_a_row_has_the_same_bits_in_any_batch_and_with_any_threads(isa: Isa, inputs: int) -> None:
    x, weight, bias = _operands(257, inputs, 83)
    packed = PackedMatrix(weight, bias)
    whole, whole32 = packed.linear(x), packed.linear_fp32(x)
    for rows in range(1, 258):
        assert torch.equal(packed.linear(x[257 - rows :]), whole[257 - rows :])
    alone = torch.cat([packed.linear_fp32(x[i : i + 1]) for i in range(257)])
    assert torch.equal(alone, whole32)
    before = torch.get_num_threads()
    for threads in (1, 2, 3, 7):
        torch.set_num_threads(threads)
        try:
            assert torch.equal(packed.linear(x), whole)
        finally:
            torch.set_num_threads(before)


@pytest.mark.parametrize("inputs", [5462, 14_336, MOST_INPUTS])
def test_so_have_rows_that_no_cache_holds(isa: Isa, inputs: int) -> None:
    x, weight, _ = _operands(30, inputs, 36)
    packed = PackedMatrix(weight)
    whole = packed.linear_fp32(x)
    for rows in (1, 4, 9, 13, 25):
        assert torch.equal(packed.linear_fp32(x[:rows]), whole[:rows])
    expected = x.double() @ weight.double().T
    size = x.double().abs() @ weight.double().abs().T
    assert bool(((whole.double() - expected).abs() <= size * 2 * (inputs + 2) * 2**-24).all())


def test_fused_gate_and_separate_operators_have_the_same_bits(isa: Isa) -> None:
    from burnish.model.kernels.gate import silu_mul

    x, weight, bias = _operands(19, 48, 140)
    both = PackedMatrix(weight, bias).linear(x)
    assert torch.equal(PackedMatrix(weight, bias, gated=True).gated(x), silu_mul(both))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_spoils_its_own_row_only(isa: Isa, bad: float) -> None:
    x, weight, _ = _operands(9, 33, 40)
    weight = weight.abs() + 0.1
    packed = PackedMatrix(weight)
    clean = packed.linear(x)
    x[4, 32] = bad
    out = packed.linear(x)
    expected = linear_reference(x, weight, None)
    torch.testing.assert_close(out[4], expected[4], equal_nan=True)
    keep = [i for i in range(9) if i != 4]
    assert torch.equal(out[keep], clean[keep])


def test_strided_rows_and_columns_are_read_as_they_lie(isa: Isa) -> None:
    x, weight, _ = _operands(12, 40, 24)
    packed = PackedMatrix(weight)
    assert torch.equal(packed.linear(x[::3]), packed.linear(x[::3].clone()))
    columns = torch.randn(40, 7).bfloat16().t()
    assert torch.equal(packed.linear(columns), packed.linear(columns.contiguous()))
    narrow = PackedMatrix(weight[:, 3:20])
    assert torch.equal(narrow.linear(x[:, 3:20]), narrow.linear(x[:, 3:20].clone()))


def test_packing_fp32_rounds_as_torch_does(isa: Isa) -> None:
    x, _, _ = _operands(5, 50, 20)
    weight = torch.randn(20, 50)
    assert torch.equal(PackedMatrix(weight).linear(x), PackedMatrix(weight.bfloat16()).linear(x))


def test_filling_again_replaces_every_number(isa: Isa) -> None:
    x, weight, bias = _operands(5, 37, 90)
    packed = PackedMatrix(torch.zeros_like(weight), torch.zeros_like(bias))
    packed.fill(weight, bias)
    assert torch.equal(packed.linear(x), PackedMatrix(weight, bias).linear(x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_one_bad_number_anywhere_is_found(isa: Isa, dtype: torch.dtype) -> None:
    values = torch.randn(200_001).to(dtype)
    assert all_finite(values)
    for place in (0, 65_536, 200_000):
        for bad in (float("nan"), float("inf"), float("-inf")):
            broken = values.clone()
            broken[place] = bad
            assert not all_finite(broken)
    # Finite in fp32, infinite once it is bf16.
    assert not all_finite(torch.tensor([3.4e38]))
    assert all_finite(torch.tensor([]))
