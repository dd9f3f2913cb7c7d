"""Rotation, gate and drawing: each against PyTorch, whatever the shape."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from burnish.model.kernels.draw import draw, given_logprobs
from burnish.model.kernels.gate import silu_mul, silu_mul_reference
from burnish.model.kernels.library import Isa
from burnish.model.kernels.rope import rotate, rotate_reference


def test_rotation_has_the_bits_of_torch_for_any_shape(isa: Isa) -> None:
    @settings(max_examples=60, deadline=None)
    @given(rows=st.integers(0, 7), heads=st.integers(1, 5), half=st.integers(1, 40))
    def check(rows: int, heads: int, half: int) -> None:
        x = torch.randn(rows, heads, 2 * half).bfloat16()
        angles = torch.randn(rows, half).repeat(1, 2) * 9
        cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()
        before = x.clone()
        assert torch.equal(rotate(x, cos, sin), rotate_reference(x, cos, sin))
        assert torch.equal(x, before)

    check()


def test_rotation_reads_strided_heads(isa: Isa) -> None:
    x = torch.randn(6, 5, 32).bfloat16()[:, 1:4]
    cos, sin = torch.randn(6, 32).bfloat16(), torch.randn(6, 32).bfloat16()
    assert torch.equal(rotate(x, cos, sin), rotate_reference(x, cos, sin))


def test_the_gate_is_within_a_unit_of_torch_and_keeps_nan(isa: Isa) -> None:
    # Every bf16 number as the gate.
    bits = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16)
    gate = bits.view(torch.bfloat16)[None]
    both = torch.cat((gate, torch.ones_like(gate)), dim=1)
    out, expected = silu_mul(both), silu_mul_reference(both)
    assert torch.equal(out.isnan(), expected.isnan())
    finite = gate.isfinite()
    torch.testing.assert_close(out[finite], expected[finite], atol=2e-38, rtol=2**-7)


def test_the_gate_takes_odd_widths_and_strides(isa: Isa) -> None:
    for rows, width in ((0, 3), (3, 1), (5, 77)):
        both = torch.randn(rows, 2 * width).bfloat16() * 4
        torch.testing.assert_close(silu_mul(both), silu_mul_reference(both), atol=1e-30, rtol=2**-6)
        assert torch.equal(silu_mul(both[::2]), silu_mul(both[::2].clone()))


def test_given_tokens_have_the_log_probs_of_a_double_softmax(isa: Isa) -> None:
    @settings(max_examples=40, deadline=None)
    @given(rows=st.integers(0, 5), width=st.integers(1, 1100), heat=st.floats(0.05, 20.0))
    def check(rows: int, width: int, heat: float) -> None:
        logits = torch.randn(rows, width) * 5
        tokens = torch.randint(0, width, (rows,))
        heats = torch.full((rows,), heat)
        scaled = logits.double() / heats.double()[:, None]
        expected = scaled.log_softmax(-1).gather(1, tokens[:, None])
        found = given_logprobs(logits, tokens, heats)
        # Of an exponential: 2 units of 2**-24; of the sum of a block: 16 in a chain, then a tree.
        torch.testing.assert_close(found, expected[:, 0], atol=24 * 2**-24, rtol=0)

    check()


def test_drawing_inverts_the_cumulative_distribution(isa: Isa) -> None:
    logits = torch.randn(1, 700) * 2
    cumulative = logits.double().softmax(-1).cumsum(-1)[0]
    uniforms = torch.rand(1001, dtype=torch.float64)
    # With the last one, the product with the total rounds to the total.
    uniforms[0], uniforms[-1] = 0.0, 1 - 2**-53
    drawn = draw(logits.expand(1001, -1), torch.ones(1001), uniforms)
    low = torch.cat((torch.zeros(1), cumulative))[drawn.tokens_N]
    high = cumulative[drawn.tokens_N]
    assert bool((low <= uniforms + 1e-6).all())
    assert bool((high >= uniforms - 1e-6).all())
    again = given_logprobs(logits.expand(1001, -1), drawn.tokens_N, torch.ones(1001))
    assert torch.equal(again, drawn.logprobs_N)


def test_a_token_of_no_weight_is_never_drawn(isa: Isa) -> None:
    logits = torch.full((3, 900), -math.inf)
    logits[:, 300] = 1.0
    logits[:, 611] = 1.0
    uniforms = torch.tensor([0.0, 0.5, 1 - 2**-53], dtype=torch.float64)
    drawn = draw(logits, torch.ones(3), uniforms)
    assert drawn.tokens_N.tolist() == [300, 611, 611]
    assert drawn.logprobs_N.tolist() == pytest.approx([-math.log(2)] * 3, abs=1e-7)


def test_the_greedy_token_is_the_first_of_equals(isa: Isa) -> None:
    logits = torch.zeros(2, 600)
    logits[0, [70, 290]] = 3.0
    drawn = draw(logits, torch.ones(2), torch.full((2,), -1.0))
    assert drawn.tokens_N.tolist() == [70, 0]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_that_is_not_finite_is_marked_and_harms_no_other(isa: Isa, bad: float) -> None:
    logits = torch.randn(3, 400)
    uniforms = torch.full((3,), 0.3, dtype=torch.float64)
    clean = draw(logits, torch.ones(3), uniforms)
    logits[1, 333] = bad
    drawn = draw(logits, torch.ones(3), uniforms)
    assert drawn.logprobs_N.isnan().tolist() == [False, True, False]
    assert drawn.logprobs_N[[0, 2]].equal(clean.logprobs_N[[0, 2]])
    logits[1] = -math.inf
    assert draw(logits, torch.ones(3), uniforms).logprobs_N.isnan().tolist() == [False, True, False]
