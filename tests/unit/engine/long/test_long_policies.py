"""Sparse attention and eviction: what always stays, what a budget means, when nothing changes."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from burnish.core.errors import UserError
from burnish.core.records import GenerateRequest, Generation, SamplingParams
from burnish.core.vocabulary import KvPolicyKind
from burnish.model.decoder import Decoder
from burnish.model.kernels.library import Isa, kernels, restricted
from burnish.rollout.engine.cache.opening import open_cache
from burnish.rollout.engine.cache.step import Span
from burnish.rollout.engine.cache.storage import CacheShape
from burnish.rollout.engine.engine import EngineCore
from burnish.rollout.engine.limits import CoreLimits
from burnish.rollout.engine.long.choice import choose_pages
from burnish.rollout.engine.long.eviction import drops
from burnish.rollout.engine.long.policy import KvPolicy

SPARSE = [kind for kind in KvPolicyKind if kind is not KvPolicyKind.FULL]
KERNELS = [Isa.TORCH] if kernels().isa is Isa.TORCH else [Isa.TORCH, kernels().isa]
PAGE = 16


def ask(name: str, prompt: list[int], **params: Any) -> GenerateRequest:
    return GenerateRequest(
        request_id=name, prompt_ids=tuple(prompt), params=SamplingParams(**params)
    )


def core_of(decoder: Decoder, kv: KvPolicy, **limits: Any) -> EngineCore:
    sizes = CoreLimits(num_pages=64, page_size=PAGE, budget_tokens=48, kv=kv)._replace(**limits)
    return EngineCore(decoder.config, decoder.state_dict(), limits=sizes, dtype=torch.bfloat16)


def answer(core: EngineCore, *requests: GenerateRequest) -> list[Generation]:
    sequences = [core.add(request) for request in requests]
    ended: dict[Any, Any] = {}
    while core.has_work:
        ended.update(core.step())
        core.check()
    assert all(isinstance(ended[s], Generation) for s in sequences)
    return [ended[s] for s in sequences]


@contextmanager
def using(isa: Isa) -> Iterator[None]:
    with restricted(isa):
        yield


def prompt_of(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 300, (length,), generator=generator).tolist()


@st.composite
def eviction_cases(draw: st.DrawFn) -> dict[str, Any]:
    size = draw(st.sampled_from([1, 4, 16]))
    sinks, recent = draw(st.integers(0, 3 * size)), draw(st.integers(0, 4 * size))
    least = -(-sinks // size) + -(-recent // size) + 1
    policy = KvPolicy(
        kind=draw(st.sampled_from([KvPolicyKind.WINDOW, KvPolicyKind.H2O, KvPolicyKind.SNAPKV])),
        budget_tokens=draw(st.integers(least * size, (least + 20) * size)),
        sink_tokens=sinks,
        recent_tokens=recent,
    )
    computed = draw(st.integers(1, 60 * size))
    num_pages = -(-computed // size)
    gone = draw(st.sets(st.integers(0, num_pages - 1)))
    always = {*range(-(-sinks // size)), num_pages - 1}
    held = [i for i in range(num_pages) if i not in gone or i in always]
    mass = draw(st.lists(st.floats(0, 100), max_size=num_pages))
    return {"policy": policy, "size": size, "held": held, "computed": computed, "mass": mass}


@given(case=eviction_cases())
def test_eviction_spares_sinks_and_recent_pages_and_keeps_the_budget(case: dict[str, Any]) -> None:
    policy, size, held, computed = (case[k] for k in ("policy", "size", "held", "computed"))
    dropped = drops(
        policy, size, held,
        num_computed=computed, num_prompt=computed, before=0, mass=case["mass"],
    )  # fmt: skip
    kept = [i for i in held if i not in dropped]
    assert set(dropped) <= set(held)
    assert dropped == sorted(set(dropped))
    assert not any(i < policy.sink_pages(size) for i in dropped)
    if policy.kind is KvPolicyKind.WINDOW:
        assert policy.window is not None
        visible = range(max(0, computed - policy.window + 1), computed)
        assert {key // size for key in visible} & set(held) <= set(kept)
        assert len(kept) <= policy.sink_pages(size) + -(-policy.window // size) + 1
        return
    recent = range(max(0, computed // size - policy.recent_pages(size)), -(-computed // size))
    assert set(recent) & set(held) <= set(kept)
    assert len(kept) <= max(policy.budget_pages(size), len(held) - len(dropped))
    if len(held) > policy.budget_pages(size):
        spared = policy.sink_pages(size) + policy.recent_pages(size) + 1
        assert len(kept) <= max(policy.budget_pages(size), spared)


@given(data=st.data())
def test_the_heaviest_pages_survive(data: st.DataObject) -> None:
    mass = data.draw(st.lists(st.integers(0, 9), min_size=8, max_size=30))
    policy = KvPolicy(kind=KvPolicyKind.H2O, budget_tokens=5, sink_tokens=1, recent_tokens=2)
    dropped = drops(
        policy, 1, range(len(mass)),
        num_computed=len(mass), num_prompt=1, before=len(mass) - 1, mass=mass,
    )  # fmt: skip
    candidates = range(1, len(mass) - 2)
    kept = [mass[i] for i in candidates if i not in dropped]
    assert len(dropped) == len(mass) - 5
    assert min(kept) >= max((mass[i] for i in dropped), default=0)


@given(data=st.data())
def test_selection_takes_the_best_bounds_beside_what_always_stays(data: st.DataObject) -> None:
    width = data.draw(st.integers(1, 40))
    sinks = data.draw(st.integers(0, width))
    recent = data.draw(st.integers(0, width - sinks))
    count = data.draw(st.integers(sinks + recent, width))
    values = st.floats(allow_nan=True, allow_infinity=True, width=32)
    rows = [data.draw(st.lists(values, min_size=width, max_size=width)) for _ in range(2)]
    bounds = torch.tensor(rows)
    chosen = choose_pages(bounds.clone(), count, sinks=sinks, recent=recent)
    for row, indices in zip(rows, chosen.tolist(), strict=True):
        assert indices == sorted(set(indices))
        assert len(indices) == count
        assert {*range(sinks), *range(width - recent, width)} <= set(indices)
        free = [i for i in range(sinks, width - recent) if i in indices]
        left = [i for i in range(sinks, width - recent) if i not in indices]
        key = torch.nan_to_num(torch.tensor(row), nan=torch.inf).tolist()
        assert all(key[i] >= key[j] for i in free for j in left)


@pytest.mark.parametrize("isa", KERNELS)
@pytest.mark.parametrize("kind", SPARSE)
def test_a_budget_for_everything_changes_nothing(
    make_decoder: Callable[..., Decoder], kind: KvPolicyKind, isa: Isa
) -> None:
    decoder = make_decoder()
    requests = [ask("a", prompt_of(150), max_tokens=12, seed=1), ask("b", prompt_of(20, 1),
                max_tokens=9, seed=2)]  # fmt: skip
    kv = KvPolicy(kind=kind, budget_tokens=512, sink_tokens=16, recent_tokens=32, report_gap=True)
    with using(isa):
        # One chunking for both: only then do PyTorch's products keep their order of sums.
        chunk = {"budget_tokens": 512}
        plain = answer(core_of(decoder, KvPolicy(), **chunk), *requests)
        sparse = answer(core_of(decoder, kv, **chunk), *requests)
    for one, other in zip(plain, sparse, strict=True):
        if isa is not Isa.TORCH:
            assert one.token_ids == other.token_ids
            assert one.logprobs == other.logprobs
        assert len(other.dense_logprobs) == len(other.token_ids)
        assert other.logprobs == pytest.approx(other.dense_logprobs, abs=0.05)


@pytest.mark.parametrize("isa", KERNELS)
@pytest.mark.parametrize("kind", SPARSE)
def test_a_small_budget_is_kept_and_its_cost_is_reported(
    make_decoder: Callable[..., Decoder], kind: KvPolicyKind, isa: Isa
) -> None:
    kv = KvPolicy(kind=kind, budget_tokens=64, sink_tokens=16, recent_tokens=32, report_gap=True)
    with using(isa):
        core = core_of(make_decoder(), kv)
        sequence = core.add(ask("a", prompt_of(200), max_tokens=30, seed=3))
        most = 0
        while core.has_work:
            ended = core.step()
            core.check()
            if not ended and sequence.num_computed >= 200:
                most = max(most, len(sequence.held_pages))
    (generation,) = [outcome for _, outcome in ended]
    assert isinstance(generation, Generation)
    assert generation.dense_logprobs != generation.logprobs
    pairs = zip(generation.dense_logprobs, generation.logprobs, strict=True)
    assert core.counters.kv_gap_nats == pytest.approx(sum(abs(a - b) for a, b in pairs))
    assert core.counters.kv_gap_tokens == 30
    if kind is KvPolicyKind.QUEST:
        assert most == -(-229 // PAGE)
    else:
        decoded = 3 if kind is KvPolicyKind.SNAPKV else 1
        assert most <= 64 // PAGE + decoded
    assert core.free_pages == 64


@pytest.mark.parametrize("isa", KERNELS)
def test_a_window_sees_sinks_and_last_tokens_whatever_the_chunks(
    make_decoder: Callable[..., Decoder], isa: Isa
) -> None:
    kv = KvPolicy(kind=KvPolicyKind.WINDOW, budget_tokens=64, sink_tokens=16)
    request = ask("a", prompt_of(180), max_tokens=10, temperature=0.0)
    with using(isa):
        decoder = make_decoder(seed=2)
        found = [
            answer(core_of(decoder, kv, budget_tokens=budget), request)[0]
            for budget in (32, 48, 512)
        ]
    for other in found[1:]:
        assert other.token_ids == found[0].token_ids
        assert other.logprobs == pytest.approx(found[0].logprobs, abs=0.05)


@pytest.mark.parametrize("isa", KERNELS)
@given(
    lengths=st.lists(st.integers(0, 70), min_size=1, max_size=3),
    seed=st.integers(0, 99),
    use_bf16=st.booleans(),
)
@settings(max_examples=20)
def test_mass_is_the_softmax_over_pages(
    make_decoder: Callable[..., Decoder],
    lengths: list[int],
    seed: int,
    use_bf16: bool,
    isa: Isa,
) -> None:
    dtype = torch.bfloat16 if use_bf16 else torch.float32
    config = make_decoder().config
    generator = torch.Generator().manual_seed(seed)
    with using(isa):
        cache = open_cache(CacheShape(config, 32, PAGE, dtype))
        pages = torch.randperm(32, generator=generator).tolist()
        spans, tables = [], []
        for length in lengths:
            count = length // PAGE + 1
            table, pages = pages[:count], pages[count:]
            tables.append(torch.tensor(table, dtype=torch.int32))
            spans.append(Span(table, 0, length + 1))
        spans.sort(key=lambda span: span.end > 1)
        tables = [torch.tensor(span.pages, dtype=torch.int32) for span in spans]
        total = sum(span.end for span in spans)
        k, v = (torch.randn(total, 2, 16, generator=generator).to(dtype) for _ in range(2))
        q = torch.randn(len(spans), 6, 16, generator=generator).to(dtype)
        cache.write(1, cache.step(spans), k, v)
        found = cache.mass(1, q, tables, [span.end - 1 for span in spans])
    begin = 0
    for row, span in enumerate(spans):
        keys = k[begin : begin + span.end].float().repeat_interleave(3, 1)
        scores = torch.einsum("hd,khd->hk", q[row].float(), keys) / 4
        for page in range(len(span.pages)):
            wanted = scores[:, page * PAGE : (page + 1) * PAGE].logsumexp(-1)
            assert torch.allclose(found[row, :, page], wanted, atol=2e-3 if use_bf16 else 1e-4)
        assert (found[row, :, len(span.pages) :] == -torch.inf).all()
        begin += span.end


def test_contradictions_are_refused(make_decoder: Callable[..., Decoder]) -> None:
    with pytest.raises(UserError, match="budget_tokens is 16"):
        core_of(make_decoder(), KvPolicy(kind=KvPolicyKind.H2O, budget_tokens=16))
    with pytest.raises(UserError, match="sliding window itself"):
        core_of(make_decoder(sliding_window=8), KvPolicy(kind=KvPolicyKind.QUEST))
    with pytest.raises(UserError, match="exact mode cannot attend by"):
        core_of(make_decoder(), KvPolicy(kind=KvPolicyKind.WINDOW), exact=True)
    with pytest.raises(UserError, match="prefill_window has no meaning"):
        core_of(make_decoder(), KvPolicy(kind=KvPolicyKind.H2O, prefill_window=8))


@pytest.mark.parametrize("isa", KERNELS)
def test_a_policy_that_changes_under_way_changes_what_the_next_token_attends(
    make_decoder: Callable[..., Decoder], isa: Isa
) -> None:
    quest = KvPolicy(kind=KvPolicyKind.QUEST, budget_tokens=64, sink_tokens=16, recent_tokens=32)
    request = ask("a", prompt_of(200), max_tokens=20, seed=3, temperature=0.0)
    with using(isa):
        decoder = make_decoder()
        core = core_of(decoder, quest, budget_tokens=400)
        dense, sparse = (answer(core_of(decoder, kv), request)[0] for kv in (KvPolicy(), quest))
        core.attend_by(KvPolicy())
        changed = answer(core, request)[0]
        assert changed.token_ids == dense.token_ids
        assert changed.logprobs == pytest.approx(dense.logprobs, abs=0.05)
        core.attend_by(quest)
        (again,) = answer(core, request)
        assert again.cached_tokens > 0
        assert again.logprobs[0] != changed.logprobs[0]
    assert sparse.logprobs != dense.logprobs


def test_a_policy_that_needs_other_pages_is_refused_under_way(
    make_decoder: Callable[..., Decoder],
) -> None:
    for before, after in (
        (KvPolicyKind.FULL, KvPolicyKind.QUEST),
        (KvPolicyKind.QUEST, KvPolicyKind.WINDOW),
        (KvPolicyKind.H2O, KvPolicyKind.FULL),
    ):
        core = core_of(make_decoder(), KvPolicy(kind=before))
        with pytest.raises(UserError, match=f"from {before} to {after}"):
            core.attend_by(KvPolicy(kind=after))
        assert core.limits.kv.kind is before


@pytest.mark.parametrize("kind", SPARSE)
def test_many_requests_with_too_few_pages_all_end(
    make_decoder: Callable[..., Decoder], kind: KvPolicyKind
) -> None:
    kv = KvPolicy(kind=kind, budget_tokens=64, sink_tokens=16, recent_tokens=32)
    core = core_of(make_decoder(), kv, num_pages=18)
    requests = [ask(f"{i}", prompt_of(90 + i, i), max_tokens=40, seed=i) for i in range(6)]
    for generation in answer(core, *requests):
        assert len(generation.token_ids) == 40
    assert core.free_pages == 18
