import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from burnish.model.kernels.library import Isa
from burnish.model.kernels.norm import rms_norm, rms_norm_reference


def _rows(rows: int, width: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, width, generator=generator).bfloat16()
    return x, torch.randn(width, generator=generator).bfloat16()


def test_norm_is_that_of_torch_for_any_shape(isa: Isa) -> None:
    @given(rows=st.integers(0, 9), width=st.integers(1, 200), seed=st.integers(0, 99))
    def check(rows: int, width: int, seed: int) -> None:
        x, weight = _rows(rows, width, seed)
        # The sums differ in order, so a value on the edge between two bf16 may round either way.
        torch.testing.assert_close(
            rms_norm(x, weight, 1e-5), rms_norm_reference(x, weight, 1e-5), atol=0, rtol=2**-7
        )

    check()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_spoils_its_own_row_only(isa: Isa, bad: float) -> None:
    x, weight = _rows(3, 37)
    clean = rms_norm(x, weight, 1e-5)
    x[1, 20] = bad
    out = rms_norm(x, weight, 1e-5)
    assert torch.equal(out.isnan(), rms_norm_reference(x, weight, 1e-5).isnan())
    assert torch.equal(out[0], clean[0])
    assert torch.equal(out[2], clean[2])


def test_strided_and_nested_inputs_are_read_where_they_are(isa: Isa) -> None:
    x, weight = _rows(6, 80)
    assert torch.equal(rms_norm(x[::2], weight, 1e-5), rms_norm(x[::2].clone(), weight, 1e-5))
    wide, narrow = x[:, 5:45], weight[5:45]
    assert torch.equal(rms_norm(wide, narrow, 1e-5), rms_norm(wide.clone(), narrow, 1e-5))
    columns = x.t()[:6]
    expected = rms_norm(columns.clone(memory_format=torch.contiguous_format), weight[:6], 1e-5)
    assert torch.equal(rms_norm(columns, weight[:6], 1e-5), expected)
    nested = rms_norm(x.view(2, 3, 80), weight, 1e-5)
    assert torch.equal(nested.view(6, 80), rms_norm(x, weight, 1e-5))


def test_a_row_has_the_same_bits_in_any_batch(isa: Isa) -> None:
    x, weight = _rows(257, 96)
    whole = rms_norm(x, weight, 1e-5)
    for rows in range(1, 258, 7):
        assert torch.equal(rms_norm(x[:rows], weight, 1e-5), whole[:rows])
