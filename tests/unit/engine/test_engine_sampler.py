"""Sampling: right frequencies, exact log-probs, randomness fixed by (seed, position)."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from burnish.rollout.engine.sampler import Draw, sample, seed_key, uniform

VOCABULARY = 700


def logits(seed: int = 0, rows: int = 1, scale: float = 2.0) -> torch.Tensor:
    return scale * torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(seed))


def draw_many(row: torch.Tensor, number: int, temperature: float, top_p: float) -> torch.Tensor:
    key = seed_key(123)
    tokens: list[int] = []
    for start in range(0, number, 4000):
        draws = [Draw(temperature, top_p, uniform(key, start + i)) for i in range(4000)]
        tokens += sample(row.expand(4000, -1), draws).tokens
    return torch.bincount(torch.tensor(tokens), minlength=VOCABULARY)


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.5])
def test_frequencies_match_the_tempered_softmax(temperature: float) -> None:
    row, number = logits(), 40_000
    counts = draw_many(row, number, temperature, 1.0).double()
    expected = (row[0].double() / temperature).softmax(-1) * number
    common = expected >= 5
    rest = torch.stack([counts[~common].sum(), expected[~common].sum()])
    statistic = ((counts - expected)[common] ** 2 / expected[common]).sum()
    statistic += (rest[0] - rest[1]) ** 2 / rest[1]
    freedom = int(common.sum())
    # Wilson-Hilferty: the cube root of chi2 / freedom is close to normal. z = 4: p = 3e-5, and
    # the seed is fixed, so this either always passes or never does.
    spread = 2 / (9 * freedom)
    z = ((statistic / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread)
    assert abs(float(z)) < 4


def test_logprobs_are_those_of_the_distribution_drawn_from() -> None:
    rows = logits(rows=6)
    draws = [Draw(t, 1.0, 0.37) for t in (1.0, 0.5, 2.0, 0.0, 1.0, 0.9)]
    result = sample(rows, draws)
    for i, draw in enumerate(draws):
        reference = (rows[i].double() / (draw.temperature or 1.0)).log_softmax(-1)
        assert result.logprobs[i] == pytest.approx(float(reference[result.tokens[i]]), abs=1e-5)


def test_temperature_zero_takes_the_likeliest() -> None:
    rows = logits(rows=3)
    assert sample(rows, [Draw(0.0, 1.0, 0.99)] * 3).tokens == rows.argmax(-1).tolist()


@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.9, 0.999])
def test_top_p_keeps_the_smallest_sufficient_set_and_renormalises(top_p: float) -> None:
    row = logits()
    probs = row[0].double().softmax(-1)
    order = probs.argsort(descending=True)
    kept = int((probs[order].cumsum(0) < top_p).sum()) + 1
    support = set(order[:kept].tolist())
    counts = draw_many(row, 8000, 1.0, top_p)
    assert set(counts.nonzero()[:, 0].tolist()) <= support
    if kept < 30:
        assert set(counts.nonzero()[:, 0].tolist()) == support
    result = sample(row, [Draw(1.0, top_p, 0.6)])
    expected = math.log(float(probs[result.tokens[0]]) / float(probs[order[:kept]].sum()))
    assert result.logprobs[0] == pytest.approx(expected, abs=1e-5)


def test_a_flat_nucleus_wider_than_the_candidates_is_still_exact() -> None:
    row = torch.zeros(1, 2000)
    result = sample(row, [Draw(1.0, 0.9, 0.9999)])
    assert result.logprobs[0] == pytest.approx(-math.log(1800), abs=1e-3)


def test_a_row_does_not_depend_on_its_batch() -> None:
    rows = logits(rows=33)
    draws = [Draw(1.0, 1.0 if i % 2 else 0.8, uniform(seed_key(i), 5)) for i in range(33)]
    together = sample(rows, draws)
    for i in range(33):
        alone = sample(rows[i : i + 1], draws[i : i + 1])
        assert (alone.tokens[0], alone.logprobs[0]) == (together.tokens[i], together.logprobs[i])


@given(st.integers(-(2**70), 2**70), st.integers(0, 10**6))
def test_uniforms_are_in_range_and_reproducible(seed: int, position: int) -> None:
    value = uniform(seed_key(seed), position)
    assert 0.0 <= value < 1.0
    assert value == uniform(seed_key(seed), position)


def test_uniforms_are_flat_and_uncorrelated() -> None:
    values = torch.tensor([uniform(seed_key(s), p) for s in range(100) for p in range(100)])
    table = values.view(100, 100)
    assert abs(float(values.mean()) - 0.5) < 4 / math.sqrt(12 * 10_000)
    for a, b in ((table[:, :-1], table[:, 1:]), (table[:-1], table[1:])):
        correlation = torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1]
        assert abs(float(correlation)) < 4 / math.sqrt(9900)


@pytest.mark.parametrize("value", [0.0, 0.5, 1 - 2**-53])
def test_extreme_uniforms_never_pick_an_impossible_token(value: float) -> None:
    row = torch.full((1, VOCABULARY), -torch.inf)
    row[0, [3, 300, 600]] = torch.tensor([0.0, 1.0, -1.0])
    token = sample(row, [Draw(1.0, 1.0, value)]).tokens[0]
    assert token == {0.0: 3, 0.5: 300}.get(value, 600)
    assert sample(row, [Draw(1.0, 0.99, value)]).tokens[0] in (3, 300, 600)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_broken_row_is_named_and_harms_no_other(bad: float) -> None:
    rows = logits(rows=3)
    draws = [Draw(1.0, 1.0, 0.5), Draw(0.7, 0.9, 0.5, num_top=2), Draw(1.0, 1.0, 0.2, top_k=3)]
    whole = sample(rows, draws)
    assert not whole.broken
    rows[1, 7] = bad
    result = sample(rows, draws)
    assert result.broken == {1}
    for i in (0, 2):
        assert result.tokens[i] == whole.tokens[i]
        assert result.logprobs[i] == whole.logprobs[i]


def test_a_row_with_nothing_left_is_broken() -> None:
    assert sample(torch.full((1, 9), -torch.inf), [Draw(1.0, 1.0, 0.5)]).broken == {0}


def reference(
    row: torch.Tensor, temperature: float, top_k: int, min_p: float, top_p: float
) -> dict[int, float]:
    """The truncated distribution by its definition, in fp64."""
    probs = (row.double() / temperature).softmax(-1)
    order = probs.argsort(descending=True).tolist()
    kept = [t for t in order if probs[t] >= min_p * probs.max()]
    kept = kept[: top_k or len(kept)]
    mass, nucleus = float(probs[kept].sum()), []
    for token in kept:
        nucleus.append(token)
        if float(probs[nucleus].sum()) >= top_p * mass:
            break
    total = float(probs[nucleus].sum())
    return {t: math.log(float(probs[t]) / total) for t in nucleus}


@pytest.mark.parametrize("temperature", [0.6, 1.0, 3.0])
@pytest.mark.parametrize(
    ("top_k", "min_p", "top_p"),
    [(1, 0, 1), (5, 0, 1), (600, 0, 1), (0, 0.2, 1), (0, 1e-4, 1), (20, 0.05, 0.7), (0, 0.1, 0.5)],
)
def test_truncation_keeps_what_its_definition_says_and_renormalises(
    temperature: float, top_k: int, min_p: float, top_p: float
) -> None:
    row = logits(seed=4)
    expected = reference(row[0], temperature, top_k, min_p, top_p)
    key, seen = seed_key(5), set()
    draws = [
        Draw(temperature, top_p, uniform(key, i), top_k, min_p, num_top=10) for i in range(300)
    ]
    result = sample(row.expand(300, -1), draws)
    best = sorted(expected.items(), key=lambda pair: -pair[1])[:10]
    for token, logprob, top in zip(result.tokens, result.logprobs, result.tops, strict=True):
        assert logprob == pytest.approx(expected[token], abs=1e-5)
        assert [t for t, _ in top] == [t for t, _ in best]
        assert [v for _, v in top] == pytest.approx([v for _, v in best], abs=1e-5)
        seen.add(token)
    assert len(seen) > 1 or len(expected) == 1


def test_top_logprobs_belong_to_the_distribution_drawn_from() -> None:
    rows = logits(rows=2)
    result = sample(rows, [Draw(0.5, 1.0, 0.5, num_top=4), Draw(0.0, 1.0, 0.5, num_top=700)])
    tempered = (rows[0].double() / 0.5).log_softmax(-1)
    values, ids = tempered.topk(4)
    assert [t for t, _ in result.tops[0]] == ids.tolist()
    assert [v for _, v in result.tops[0]] == pytest.approx(values.tolist(), abs=1e-5)
    greedy = rows[1].double().log_softmax(-1)
    assert result.tops[1][0] == (result.tokens[1], pytest.approx(float(greedy.max()), abs=1e-5))
    assert len(result.tops[1]) == 700


@pytest.mark.parametrize("temperature", [1e-300, 1e-38, 1e-6, 1e6, 1e38, 1e300])
def test_extreme_temperatures_neither_overflow_nor_break(temperature: float) -> None:
    row = logits()
    row[0, 5] = -torch.inf
    result = sample(row, [Draw(temperature, 1.0, 0.73), Draw(temperature, 0.9, 0.2)][:1])
    assert not result.broken
    if temperature < 1:
        assert result.tokens[0] == int(row.argmax())
        assert result.logprobs[0] == pytest.approx(0.0, abs=1e-6)
    else:
        # Flat over all but the impossible token, up to what fp32 logits differ by over 1e6.
        assert result.logprobs[0] == pytest.approx(-math.log(VOCABULARY - 1), abs=1e-4)
        assert result.tokens[0] != 5
