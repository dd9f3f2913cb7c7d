"""Steps of attention over pages, and what they must come to: a dense softmax in fp32."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import pytest
import torch
from emulated_tiles import emulated, emulation_problem
from hypothesis import strategies as st
from torch import Tensor

from burnish.core.vocabulary import KvDtype
from burnish.model.config import ModelConfig
from burnish.model.kernels.library import Isa, kernels, restricted
from burnish.rollout.engine.cache.codec import quantize, restore
from burnish.rollout.engine.cache.paired import PairedCache
from burnish.rollout.engine.cache.step import Span
from burnish.rollout.engine.cache.storage import CacheShape, KvCache, StepAttend


@contextmanager
def using(isa: Isa) -> Iterator[None]:
    """Up to `isa`; tiles that this CPU lacks are emulated."""
    if list(Isa).index(isa) <= list(Isa).index(kernels().isa):
        with restricted(isa):
            yield
        return
    problem = emulation_problem() if isa is Isa.AMX else f"this machine has no {isa}"
    if problem is not None:
        pytest.skip(problem)
    with emulated():
        yield


class Case(NamedTuple):
    """One step of several sequences, and the heads that compute it."""

    heads: tuple[int, int, int]
    spans: list[tuple[int, int]]
    page_size: int
    window: int | None
    sinks: int
    seed: int


def config_of(heads: tuple[int, int, int], window: int | None = None) -> ModelConfig:
    num_heads, num_kv, width = heads
    return ModelConfig(
        family="llama",
        vocab_size=8,
        hidden_size=num_heads * width,
        intermediate_size=16,
        num_layers=1,
        num_heads=num_heads,
        num_kv_heads=num_kv,
        head_dim=width,
        max_position_embeddings=10**6,
        rms_norm_eps=1e-5,
        rope_theta=1e4,
        tie_word_embeddings=True,
        sliding_window=window,
    )


HEADS = st.sampled_from(
    [(9, 3, 64), (4, 4, 32), (7, 1, 16), (2, 1, 128), (6, 2, 96), (12, 1, 32), (16, 1, 16)]
)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    past = st.one_of(st.integers(0, 70), st.just(1023), st.just(1100))
    lengths = st.tuples(past, st.one_of(st.just(1), st.integers(1, 80)))
    spans = sorted(draw(st.lists(lengths, min_size=1, max_size=4)), key=lambda s: s[1] > 1)
    window = draw(st.one_of(st.none(), st.integers(1, 100)))
    return Case(
        draw(HEADS),
        spans,
        draw(st.sampled_from([16, 32, 48])),
        window,
        draw(st.integers(0, 20)) if window else 0,
        draw(st.integers(0, 99)),
    )


class Tokens(NamedTuple):
    """Queries, keys and values of whole sequences, one entry each."""

    q: list[Tensor]
    k: list[Tensor]
    v: list[Tensor]


def tokens_of(case: Case, dtype: torch.dtype) -> Tokens:
    g = torch.Generator().manual_seed(case.seed)
    num_heads, num_kv, width = case.heads
    made: list[list[Tensor]] = [[], [], []]
    for start, count in case.spans:
        for kind, heads in zip(made, (num_heads, num_kv, num_kv), strict=True):
            kind.append(torch.randn(start + count, heads, width, generator=g).to(dtype))
    return Tokens(*made)


def dense(q: Tensor, k: Tensor, v: Tensor, case: Case, keep: Tensor | None = None) -> Tensor:
    """Outputs of the last tokens, fp32; `keep` says which keys exist."""
    first, length = len(k) - len(q), len(k)
    k, v = (x.float().repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.float(), k) * q.shape[2] ** -0.5
    query, key = torch.arange(first, length)[:, None], torch.arange(length)
    seen = key <= query
    if case.window is not None:
        seen &= (key > query - case.window) | (key < case.sinks)
    if keep is not None:
        seen &= keep
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)


def make_cache(
    case: Case,
    dtype: torch.dtype,
    kv_dtype: KvDtype = KvDtype.MODEL,
    *,
    kind: Callable[[CacheShape], KvCache] = PairedCache,
    with_bounds: bool = False,
    spare: int = 2,
    tiles: bool = False,
) -> tuple[KvCache, list[list[int]]]:
    """A cache and scattered pages for every span; `spare` pages belong to nobody."""
    counts = [-(-(start + count) // case.page_size) for start, count in case.spans]
    shape = CacheShape(
        config_of(case.heads, case.window),
        sum(counts) + spare,
        case.page_size,
        dtype,
        kv_dtype=kv_dtype,
        sinks=case.sinks,
        with_bounds=with_bounds,
        tiles=tiles,
    )
    order = torch.randperm(shape.num_pages, generator=torch.Generator().manual_seed(case.seed))
    left, pages = order.tolist(), []
    for count in counts:
        pages.append(left[:count])
        left = left[count:]
    return kind(shape), pages


def run(cache: KvCache, case: Case, pages: list[list[int]], t: Tokens, chunk: int = 37) -> Tensor:
    """Fill the past in chunks, then attend the step itself."""
    for i, (start, _) in enumerate(case.spans):
        for first in range(0, start, chunk):
            rows = slice(first, min(first + chunk, start))
            step = cache.step([Span(pages[i], rows.start, rows.stop)])
            cache.write(0, step, t.k[i][rows], t.v[i][rows])
    step = cache.step([Span(p, s, s + n) for p, (s, n) in zip(pages, case.spans, strict=True)])
    now = [torch.cat([x[s:] for x, (s, _) in zip(xs, case.spans, strict=True)]) for xs in t]
    return StepAttend(cache, step)(0, *now)


def expected(case: Case, t: Tokens) -> Tensor:
    return torch.cat(
        [dense(q[start:], k, v, case) for q, k, v, (start, _) in zip(*t, case.spans, strict=True)]
    )


def as_stored(t: Tokens, kv_dtype: KvDtype) -> Tokens:
    """What a one-byte cache gives back."""

    def kept(x: Tensor) -> Tensor:
        return restore(*quantize(x, kv_dtype), kv_dtype, torch.float32)

    return Tokens(t.q, [kept(k) for k in t.k], [kept(v) for v in t.v])


# bf16: outputs up to 4 are rounded by 2^-7 at most, weights by 2^-9 of values up to 4.
TOLERANCE = {torch.bfloat16: 2**-6, torch.float32: 2e-5}
