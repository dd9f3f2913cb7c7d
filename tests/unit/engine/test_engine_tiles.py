"""Reading prompts by emulated tiles (AMX): bits, what is exact, and what threads hold."""

from collections.abc import Callable, Iterator
from typing import cast

import pytest
import torch
from attention_cases import Case, Tokens, make_cache, run, tokens_of
from emulated_tiles import emulated, emulation_problem, tiles_left, tiles_opened
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from burnish.core.records import GenerateRequest, TrainSequence
from burnish.core.vocabulary import KvDtype
from burnish.model.decoder import Decoder
from burnish.model.kernels.attention import PagedLayer, PageKind, PageShape, SpanTable
from burnish.rollout.engine.cache.paired import PairedCache
from burnish.rollout.engine.engine import CoreLimits, EngineCore
from burnish.run.trainer_thread import TrainerThread
from burnish.run.training import PolicyTrainer, ServedAs
from burnish.train.config import TrainConfig
from burnish.train.trainer import Trainer

pytestmark = pytest.mark.skipif(emulation_problem() is not None, reason=str(emulation_problem()))
# From so many tokens on a span goes through tiles (TILED_TOKENS).
TILED = 32


@pytest.fixture(autouse=True)
def tiles() -> Iterator[None]:
    with emulated():
        yield
    assert tiles_left() == 0


def attended(case: Case, t: Tokens, *, tiles: bool, kv_dtype: KvDtype = KvDtype.MODEL) -> Tensor:
    cache, pages = make_cache(case, torch.bfloat16, kv_dtype, tiles=tiles)
    return run(cache, case, pages, t)


long_spans = st.builds(
    Case,
    st.sampled_from([(9, 3, 64), (4, 4, 32), (2, 1, 128), (6, 2, 96)]),
    st.lists(
        st.tuples(st.one_of(st.integers(0, 90), st.just(1010)), st.integers(TILED, 90)),
        min_size=1,
        max_size=2,
    ),
    st.sampled_from([16, 32, 48]),
    st.one_of(st.none(), st.integers(1, 100)),
    st.just(0),
    st.integers(0, 99),
)


@settings(max_examples=6, deadline=None)
@given(case=long_spans, page_size=st.sampled_from([16, 64]), sinks=st.integers(0, 20))
def test_a_long_spans_bits_depend_on_no_neighbour_place_or_size_of_pages(
    case: Case, page_size: int, sinks: int
) -> None:
    case = case._replace(sinks=sinks if case.window else 0)
    t = tokens_of(case, torch.bfloat16)
    before = tiles_opened()
    together = attended(case, t, tiles=True).split([count for _, count in case.spans])
    assert tiles_opened() > before
    for i, span in enumerate(case.spans):
        alone = case._replace(spans=[span], page_size=page_size, seed=case.seed + 1)
        own = Tokens(*([x[i]] for x in t))
        assert torch.equal(attended(alone, own, tiles=True), together[i])


@settings(max_examples=5, deadline=None)
@given(case=long_spans, cut=st.integers(TILED, 60), window=st.one_of(st.none(), st.integers(1, 60)))
def test_a_row_has_the_same_bits_in_any_long_chunk(
    case: Case, cut: int, window: int | None
) -> None:
    start, rest = case.spans[0]
    case = case._replace(spans=[(start, cut + rest)], window=window)
    t = tokens_of(case, torch.bfloat16)
    whole = attended(case, t, tiles=True)
    first = case._replace(spans=[(start, cut)])
    start_of = Tokens(*([x[0][: start + cut]] for x in t))
    second = case._replace(spans=[(start + cut, rest)])
    chunks = (attended(first, start_of, tiles=True), attended(second, t, tiles=True))
    assert torch.equal(torch.cat(chunks), whole)


@pytest.mark.parametrize("threads", [2, 3])
def test_threads_change_no_bits_and_give_their_tiles_back(threads: int) -> None:
    case = Case((9, 3, 64), [(40, 1), (1000, 50), (0, 100)], 16, None, 0, 3)
    t = tokens_of(case, torch.bfloat16)
    before = torch.get_num_threads()
    outs = []
    try:
        for count in (1, threads):
            torch.set_num_threads(count)
            outs.append(attended(case, t, tiles=True))
            assert tiles_left() == 0
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*outs)


@pytest.mark.parametrize(
    ("heads", "count", "kv_dtype"),
    [
        ((9, 3, 64), TILED - 1, KvDtype.MODEL),
        ((4, 2, 48), 70, KvDtype.MODEL),
        ((9, 3, 64), 70, KvDtype.INT8),
        ((9, 3, 64), 70, KvDtype.FP8),
    ],
)
def test_short_spans_odd_widths_and_one_byte_pages_have_the_bits_of_the_vectors(
    heads: tuple[int, int, int], count: int, kv_dtype: KvDtype
) -> None:
    case = Case(heads, [(50, 1), (50, count)], 16, None, 0, 3)
    t = tokens_of(case, torch.bfloat16)
    before = tiles_opened()
    outs = [attended(case, t, tiles=tiles, kv_dtype=kv_dtype) for tiles in (True, False)]
    assert torch.equal(*outs)
    assert tiles_opened() == before


def test_a_short_span_keeps_its_bits_beside_a_long_one() -> None:
    case = Case((9, 3, 64), [(50, 1), (60, 20), (50, 70)], 16, 40, 4, 3)
    t = tokens_of(case, torch.bfloat16)
    before = tiles_opened()
    mixed, plain = (attended(case, t, tiles=tiles) for tiles in (True, False))
    assert tiles_opened() > before
    assert torch.equal(mixed[:21], plain[:21])


@settings(max_examples=5, deadline=None)
@given(case=long_spans)
def test_nothing_outside_a_rows_pages_is_read(case: Case) -> None:
    t = tokens_of(case, torch.bfloat16)
    cache, pages = make_cache(case, torch.bfloat16, tiles=True)
    for tensors in cache.stores:
        for tensor in tensors:
            tensor.fill_(0xFF)  # NaN in bf16
    assert bool(run(cache, case, pages, t).isfinite().all())


def test_pages_that_are_missing_and_masses_are_those_of_the_vectors() -> None:
    g = torch.Generator().manual_seed(5)
    keys, rows = 160, 48
    k, v = torch.randn(2, keys + rows, 2, 64, generator=g).bfloat16()
    q = torch.randn(rows, 4, 64, generator=g)
    found = []
    for tiles in (True, False):
        layer = PagedLayer(PageShape(PageKind.BF16, 16, 2, 64), 13, with_tiles=tiles)
        layer.write(torch.arange(keys + rows), k, v)
        # Holes of one unit, of a whole chunk and of a whole block.
        pages = torch.tensor([0, -1, 2, 3, -1, -1, 6, 7, -1, 9, -1, 11, 12], dtype=torch.int32)
        table = SpanTable(torch.tensor([(0, rows, keys, 0, 0, 0)]), pages)
        masses_TH = torch.empty(rows, 4)
        found.append((layer.attend(q, table, masses_TH), masses_TH))
    for tiled, plain in zip(*found, strict=True):
        assert not torch.equal(tiled, plain)
        # A weight may be rounded to the neighbouring bf16 number, 2^-8 of it away.
        torch.testing.assert_close(tiled, plain, atol=2**-6, rtol=1e-6)
    torch.testing.assert_close(found[0][1], found[1][1], atol=1e-5, rtol=1e-5)


PROMPT = [(7 * i * i + 3 * i) % 300 for i in range(70)]


def test_an_engine_reads_prompts_by_tiles_unless_it_is_exact(
    make_decoder: Callable[..., Decoder], request_for: Callable[..., GenerateRequest]
) -> None:
    decoder = make_decoder(head_dim=32)
    opened = []
    for exact in (False, True):
        limits = CoreLimits(exact=exact, num_pages=40, page_size=16)
        core = EngineCore(decoder.config, decoder.state_dict(), limits=limits)
        before = tiles_opened()
        core.add(request_for("r", PROMPT, max_tokens=12, seed=1))
        ended = [g for _ in range(30) for _, g in core.step()]
        assert len(ended[0].token_ids) == 12
        opened.append(tiles_opened() - before)
    assert opened[0] > 0
    assert opened[1] == 0


def test_exact_mode_has_one_kind_of_bits_from_sampling_to_the_canary_and_the_trainer(
    make_decoder: Callable[..., Decoder], request_for: Callable[..., GenerateRequest]
) -> None:
    decoder = make_decoder(head_dim=32)
    limits = CoreLimits(exact=True, num_pages=40, page_size=16)
    core = EngineCore(decoder.config, decoder.state_dict(), limits=limits)
    core.add(request_for("r", PROMPT, max_tokens=40, seed=1))
    (reply,) = [g for _ in range(60) for _, g in core.step()]
    tokens, zeros = (*PROMPT, *reply.token_ids), (0.0,) * len(PROMPT)
    # Decoded one by one, and now read as one long span.
    scores = core.score(tokens)
    assert scores[len(PROMPT) :] == tuple(reply.logprobs)
    trainer = Trainer(TrainConfig(exact=True, dtype="bfloat16"), decoder)
    served_as = ServedAs(torch.bfloat16, 16, torch.get_num_threads(), exact=True)
    policy = PolicyTrainer(
        trainer, cast(TrainerThread, None), served_as=served_as, keep_checkpoints=1
    )
    assert policy._score(tokens) == scores
    sequence = TrainSequence(
        token_ids=tokens,
        loss_mask=(*[False] * len(PROMPT), *[True] * 40),
        logprobs=(*zeros, *reply.logprobs),
        advantages=(*zeros, *[1.0] * 40),
        prefix_group="r",
        num_prefix_tokens=len(PROMPT),
        domain="d",
    )
    assert trainer.logprobs([sequence]) == [torch.tensor(reply.logprobs).tolist()]


def test_only_the_cache_of_an_engine_that_is_not_exact_asks_for_tiles() -> None:
    case = Case((9, 3, 64), [(0, 70)], 16, None, 0, 1)
    cache, pages = make_cache(case, torch.bfloat16, kind=PairedCache)
    before = tiles_opened()
    run(cache, case, pages, tokens_of(case, torch.bfloat16))
    assert tiles_opened() == before
