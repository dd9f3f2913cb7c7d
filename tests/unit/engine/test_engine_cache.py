"""Attention over pages against a dense softmax in fp32, for every kind of cache and kernel."""

import pytest
import torch
from attention_cases import (
    TOLERANCE,
    Case,
    Tokens,
    as_stored,
    cases,
    config_of,
    dense,
    expected,
    make_cache,
    run,
    tokens_of,
    using,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from burnish.core.vocabulary import KvDtype
from burnish.model.kernels.attention import attend_packed
from burnish.model.kernels.library import Isa, kernels, restricted
from burnish.rollout.engine.cache.gathered import GatheredCache
from burnish.rollout.engine.cache.opening import open_cache
from burnish.rollout.engine.cache.paired import PairedCache
from burnish.rollout.engine.cache.step import Span
from burnish.rollout.engine.cache.storage import CacheShape, KvCache

ISAS = [isa for isa in Isa if isa is not Isa.TORCH]
needs_kernels = pytest.mark.skipif(kernels().isa is Isa.TORCH, reason="no native kernels here")


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("isa", ISAS)
@settings(max_examples=12, deadline=None)
@given(case=cases())
def test_native_attention_is_the_dense_one(isa: Isa, dtype: torch.dtype, case: Case) -> None:
    with using(isa):
        t = tokens_of(case, dtype)
        cache, pages = make_cache(case, dtype, tiles=True)
        out = run(cache, case, pages, t)
    bound = TOLERANCE[dtype]
    torch.testing.assert_close(out.float(), expected(case, t), atol=bound, rtol=bound)


@settings(max_examples=15, deadline=None)
@given(case=cases(), dtype=st.sampled_from(list(TOLERANCE)))
def test_gathered_attention_is_the_dense_one(case: Case, dtype: torch.dtype) -> None:
    t = tokens_of(case, dtype)
    cache, pages = make_cache(case, dtype, kind=GatheredCache)
    bound = 2 * TOLERANCE[dtype]
    torch.testing.assert_close(
        run(cache, case, pages, t).float(), expected(case, t), atol=bound, rtol=bound
    )


@pytest.mark.parametrize("isa", list(Isa))
@pytest.mark.parametrize("kv_dtype", [KvDtype.INT8, KvDtype.FP8])
@settings(max_examples=6, deadline=None)
@given(case=cases())
def test_one_byte_caches_attend_what_the_codec_kept(
    isa: Isa, kv_dtype: KvDtype, case: Case
) -> None:
    with using(isa):
        t = tokens_of(case, torch.bfloat16)
        kind = GatheredCache if isa is Isa.TORCH else PairedCache
        cache, pages = make_cache(case, torch.bfloat16, kv_dtype, kind=kind, tiles=True)
        out = run(cache, case, pages, t)
    # The gathered path rounds what it reads back to bf16.
    bound = 2**-5
    wanted = expected(case, as_stored(t, kv_dtype))
    torch.testing.assert_close(out.float(), wanted, atol=bound, rtol=bound)


@needs_kernels
@pytest.mark.parametrize("isa", ISAS)
@settings(max_examples=8, deadline=None)
@given(case=cases(), kv_dtype=st.sampled_from(list(KvDtype)), chunk=st.integers(1, 200))
def test_a_row_has_the_same_bits_alone_in_any_chunk_and_place(
    isa: Isa, case: Case, kv_dtype: KvDtype, chunk: int
) -> None:
    with using(isa):
        t = tokens_of(case, torch.bfloat16)
        cache, pages = make_cache(case, torch.bfloat16, kv_dtype)
        together = run(cache, case, pages, t).split([n for _, n in case.spans])
        for i, (start, count) in enumerate(case.spans):
            alone = case._replace(spans=[(start + count - 1, 1)], seed=case.seed + 1, page_size=64)
            own = Tokens(*([x[i]] for x in t))
            cache, pages = make_cache(alone, torch.bfloat16, kv_dtype)
            last = run(cache, alone, pages, own, chunk)
            assert torch.equal(last[0], together[i][-1])
            if kv_dtype is KvDtype.MODEL:
                packed = attend_packed(
                    own.q[0], own.k[0], own.v[0], [len(own.k[0])],
                    window=case.window, sinks=case.sinks,
                )  # fmt: skip
                assert torch.equal(packed[start:], together[i])


@needs_kernels
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("kv_dtype", list(KvDtype))
def test_threads_change_no_bits(threads: int, kv_dtype: KvDtype) -> None:
    case = Case((9, 3, 64), [(5000, 1), (40, 1), (1000, 50)], 16, None, 0, 3)
    t = tokens_of(case, torch.bfloat16)
    before = torch.get_num_threads()
    outs = []
    try:
        for count in (1, threads):
            torch.set_num_threads(count)
            cache, pages = make_cache(case, torch.bfloat16, kv_dtype)
            outs.append(run(cache, case, pages, t, 512))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*outs)


@needs_kernels
@pytest.mark.parametrize("kv_dtype", list(KvDtype))
@settings(max_examples=10, deadline=None)
@given(case=cases())
def test_nothing_outside_a_rows_pages_is_read(kv_dtype: KvDtype, case: Case) -> None:
    t = tokens_of(case, torch.bfloat16)
    cache, pages = make_cache(case, torch.bfloat16, kv_dtype)
    for tensors in cache.stores:
        for tensor in tensors:
            tensor.fill_(0xFF)  # NaN in bf16, in fp8 and in every scale
    assert bool(run(cache, case, pages, t).isfinite().all())


@pytest.mark.parametrize("kind", [PairedCache, GatheredCache])
@settings(max_examples=10, deadline=None)
@given(
    start=st.integers(0, 400),
    count=st.sampled_from([1, 30]),
    seed=st.integers(0, 99),
    data=st.data(),
)
def test_only_chosen_pages_and_no_holes_are_attended(
    kind: type[KvCache], start: int, count: int, seed: int, data: st.DataObject
) -> None:
    if kind is PairedCache and kernels().isa is Isa.TORCH:
        pytest.skip("no native kernels here")
    case = Case((6, 2, 32), [(start, count)], 16, None, 0, seed)
    t = tokens_of(case, torch.float32)
    cache, (pages,) = make_cache(case, torch.float32, kind=kind)
    run(cache, case, [pages], t)
    chosen = data.draw(st.lists(st.booleans(), min_size=start // 16, max_size=start // 16))
    kept = [i for i, yes in enumerate(chosen) if yes]
    keep = torch.tensor([*chosen, *[True] * (len(pages) - len(chosen))]).repeat_interleave(16)
    wanted = dense(t.q[0][start:], t.k[0], t.v[0], case, keep[: start + count])
    holed = [page if i >= start // 16 or chosen[i] else -1 for i, page in enumerate(pages)]
    for span in (Span(pages, start, start + count, kept), Span(holed, start, start + count)):
        out = cache.attend(0, t.q[0][start:], cache.step([span]))
        torch.testing.assert_close(out, wanted, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("kind", [PairedCache, GatheredCache])
@pytest.mark.parametrize("kv_dtype", list(KvDtype))
@settings(max_examples=8, deadline=None)
@given(length=st.integers(1, 100), seed=st.integers(0, 99), dtype=st.sampled_from(list(TOLERANCE)))
def test_page_bounds_hold_for_every_key(
    kind: type[KvCache], kv_dtype: KvDtype, length: int, seed: int, dtype: torch.dtype
) -> None:
    if kind is PairedCache and kernels().isa is Isa.TORCH:
        pytest.skip("no native kernels here")
    case = Case((6, 2, 32), [(0, length), (0, 20)], 16, None, 0, seed)
    t = tokens_of(case, dtype)
    cache, pages = make_cache(case, dtype, kv_dtype, kind=kind, with_bounds=True)
    run(cache, case, pages, t)
    bounds = cache.bound(0, torch.stack([t.q[0][-1], t.q[1][-1]]), pages)
    keys = t if kv_dtype is KvDtype.MODEL else as_stored(t, kv_dtype)
    for row in range(2):
        k = keys.k[row].to(dtype if kind is GatheredCache else torch.float32)
        k = k.float().repeat_interleave(3, 1)
        scores = torch.einsum("hd,khd->hk", t.q[row][-1].float(), k) * 32**-0.5
        for i in range(len(pages[row])):
            own = scores[:, i * 16 : (i + 1) * 16]
            assert bool((bounds[row, :, i] >= own.amax(1) - 1e-4).all())
            # One key alone is its own bound, but for what bf16 rounds outward.
            if own.shape[1] == 1:
                torch.testing.assert_close(bounds[row, :, i], own[:, 0], atol=0.1, rtol=0.1)


@pytest.mark.parametrize("kind", [PairedCache, GatheredCache])
@pytest.mark.parametrize("kv_dtype", list(KvDtype))
def test_pages_move_without_changing_a_bit(kind: type[KvCache], kv_dtype: KvDtype) -> None:
    if kind is PairedCache and kernels().isa is Isa.TORCH:
        pytest.skip("no native kernels here")
    case = Case((6, 2, 32), [(90, 1)], 16, None, 0, 5)
    t = tokens_of(case, torch.bfloat16)
    cache, (pages,) = make_cache(
        case, torch.bfloat16, kv_dtype, kind=kind, with_bounds=True, spare=6
    )
    before = run(cache, case, [pages], t)
    free = [page for page in range(12) if page not in pages]
    saved = cache.save_pages(pages[:5])
    cache.copy_page(pages[5], free[5])
    cache.clear_pages(pages)
    cache.load_pages(saved, free[:5])
    after = cache.attend(0, t.q[0][-1:], cache.step([Span(free, 90, 91)]))
    assert torch.equal(before, after)
    tables = [free]
    assert bool(cache.bound(0, t.q[0][-1:], tables).isfinite().all())


def test_one_byte_pages_take_half_the_memory() -> None:
    sizes = {}
    for kv_dtype in KvDtype:
        for kind in (PairedCache, GatheredCache):
            if kind is PairedCache and kernels().isa is Isa.TORCH:
                continue
            case = Case((9, 3, 64), [(0, 16)], 16, None, 0, 0)
            cache, _ = make_cache(case, torch.bfloat16, kv_dtype, kind=kind)
            sizes.setdefault(kv_dtype, set()).add(cache.num_bytes_per_page)
            assert cache.num_bytes == cache.num_bytes_per_page * cache.shape.num_pages
    assert sizes[KvDtype.MODEL] == {2 * 16 * 3 * 64 * 2}
    assert sizes[KvDtype.INT8] == sizes[KvDtype.FP8]
    assert max(sizes[KvDtype.INT8]) <= 0.53 * min(sizes[KvDtype.MODEL])


def test_what_the_kernels_cannot_take_is_gathered() -> None:
    def opened(heads: tuple[int, int, int], page_size: int) -> type:
        return type(open_cache(CacheShape(config_of(heads), 2, page_size, torch.bfloat16)))

    assert opened((2, 1, 20), 16) is GatheredCache
    assert opened((2, 1, 32), 8) is GatheredCache
    with restricted(Isa.TORCH):
        assert opened((2, 1, 32), 16) is GatheredCache
    if kernels().isa is not Isa.TORCH:
        assert opened((2, 1, 32), 16) is PairedCache


@needs_kernels
def test_a_broken_key_is_seen_by_its_own_sequence_only() -> None:
    case = Case((6, 2, 32), [(20, 1), (20, 1)], 16, None, 0, 1)
    for kv_dtype in KvDtype:
        t = tokens_of(case, torch.bfloat16)
        t.k[0][3] = torch.nan
        t.v[0][4] = torch.inf
        cache, pages = make_cache(case, torch.bfloat16, kv_dtype)
        out = run(cache, case, pages, t)
        assert not bool(out[0].isfinite().any())
        assert bool(out[1].isfinite().all())
