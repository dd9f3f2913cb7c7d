"""The packed attention against dense attention, one sequence at a time."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from burnish.core.records import TrainSequence
from burnish.train import attention
from burnish.train.attention import PackedAttention
from burnish.train.layout import Layout, lay_out
from burnish.train.packing import pack

H, K, D = 6, 2, 8


def step(prefixes: list[int], suffixes: list[list[int]]) -> list[TrainSequence]:
    found = []
    for group, (num_prefix, lengths) in enumerate(zip(prefixes, suffixes, strict=True)):
        for length in lengths:
            n = num_prefix + length
            found.append(
                TrainSequence(
                    token_ids=(*range(num_prefix), *(7,) * length),
                    loss_mask=(False,) + (True,) * (n - 1),
                    logprobs=(0.0,) * n,
                    advantages=(0.0,) * n,
                    prefix_group=str(group),
                    num_prefix_tokens=num_prefix,
                    domain="d",
                )
            )
    return found


def dense(q: Tensor, k: Tensor, v: Tensor, rows: list[int], window: int | None) -> Tensor:
    """Plain masked softmax over the rows of one sequence."""
    n = len(rows)
    q, k, v = (x[rows].transpose(0, 1) for x in (q, k, v))
    k, v = (x.repeat_interleave(H // K, dim=0) for x in (k, v))
    i, j = torch.arange(n)[:, None], torch.arange(n)[None]
    hidden = (j > i) if window is None else (j > i) | (j <= i - window)
    scores = (q @ k.mT / D**0.5).masked_fill(hidden, -torch.inf)
    return (scores.softmax(-1) @ v).transpose(0, 1)


def rows_of(layout: Layout, sequences: list[TrainSequence]) -> list[list[int]]:
    """Flat rows of every sequence, read back from its targets (all tokens after the first are)."""
    rows: list[list[int]] = [[] for _ in sequences]
    for row, owner in zip(layout.target_rows_N.tolist(), layout.sequence_N.tolist(), strict=True):
        rows[owner].append(row)
    return [[*r, r[-1] + 1] for r in rows]


def compare(sequences: list[TrainSequence], window: int | None, dtype: torch.dtype) -> float:
    """Largest difference of outputs and gradients."""
    (one,) = pack(sequences, 10**6)
    layout = lay_out(sequences, one)
    g = torch.Generator().manual_seed(0)
    inputs = [
        torch.randn(one.num_tokens, heads, D, generator=g, dtype=dtype).requires_grad_()
        for heads in (H, K, K)
    ]
    out = PackedAttention(layout, window)(0, *inputs)
    worst, loss, wanted = 0.0, torch.zeros((), dtype=dtype), torch.zeros((), dtype=dtype)
    for rows in rows_of(layout, sequences):
        reference = dense(*inputs, rows, window)
        weights = torch.randn(reference.shape, generator=g, dtype=dtype)
        worst = max(worst, (out[rows] - reference).abs().max().item())
        loss = loss + (out[rows] * weights).sum()
        wanted = wanted + (reference * weights).sum()
    for a, b in zip(
        torch.autograd.grad(loss, inputs), torch.autograd.grad(wanted, inputs), strict=True
    ):
        worst = max(worst, (a - b).abs().max().item())
    return worst


GROUP = st.tuples(st.integers(0, 9), st.lists(st.integers(2, 30), min_size=1, max_size=4))


@settings(max_examples=40, deadline=None)
@given(st.lists(GROUP, min_size=1, max_size=3), st.none() | st.integers(1, 12))
def test_packed_attention_equals_dense_attention_and_its_gradients(groups, window):
    sequences = step([g[0] for g in groups], [g[1] for g in groups])
    assert compare(sequences, window, torch.float32) < 1e-5


@pytest.mark.parametrize("window", [None, 5])
def test_query_chunks_change_nothing(monkeypatch, window):
    monkeypatch.setattr(attention, "_CHUNK_QUERIES", 7)
    monkeypatch.setattr(attention, "_SCORES_BYTES", 4000)
    assert compare(step([6, 0], [[20, 40, 3], [50]]), window, torch.float32) < 1e-5


def test_a_member_that_ends_with_the_prefix_takes_part():
    sequences = step([6], [[0, 4]])
    (one,) = pack(sequences, 100)
    layout = lay_out(sequences, one)
    q, k, v = (torch.randn(one.num_tokens, heads, D) for heads in (H, K, K))
    out = PackedAttention(layout)(0, q, k, v)
    assert (out[:6] - dense(q, k, v, list(range(6)), None)).abs().max() < 1e-5


def test_bf16_stays_close_to_fp32():
    sequences = step([40], [[30, 28, 9]])
    (one,) = pack(sequences, 1000)
    layout = lay_out(sequences, one)
    q, k, v = (torch.randn(one.num_tokens, heads, D).bfloat16() for heads in (H, K, K))
    low = PackedAttention(layout)(0, q, k, v).float()
    high = PackedAttention(layout)(0, q.float(), k.float(), v.float())
    # Two roundings to 8 bits: of the probabilities and of the output.
    assert (low - high).abs().max() < 2 * 2**-8 * v.float().abs().max()
