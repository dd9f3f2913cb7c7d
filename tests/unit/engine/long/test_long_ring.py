"""A prompt over several processes: the same keys and values, equal shares, and no hang."""

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from burnish.core.errors import ClassifiedFailure, UserError
from burnish.core.records import GenerateRequest, Generation, SamplingParams
from burnish.model.decoder import Decoder
from burnish.model.kernels.library import Isa, kernels, restricted
from burnish.rollout.engine.engine import EngineCore
from burnish.rollout.engine.limits import CoreLimits
from burnish.rollout.engine.long.policy import KvPolicy
from burnish.rollout.engine.ring.merge import attend_part, merge
from burnish.rollout.engine.ring.prefill import RingPrefill
from burnish.rollout.engine.ring.split import PIECE_UNIT, num_scores, pieces_of, positions_of

KERNELS = [Isa.TORCH] if kernels().isa is Isa.TORCH else [Isa.TORCH, kernels().isa]


@given(num_tokens=st.integers(0, 5000), num_workers=st.integers(1, 9))
def test_every_token_has_one_worker_and_all_work_alike(num_tokens: int, num_workers: int) -> None:
    pieces = pieces_of(num_tokens, num_workers)
    positions = [p for each in pieces for p in positions_of(each)]
    assert sorted(positions) == list(range(num_tokens))
    work = [num_scores(each) for each in pieces]
    assert sum(work) == num_tokens * (num_tokens + 1) // 2
    # Each of four ends may be one unit off, and every token sees at most num_tokens keys.
    assert max(work) - min(work) <= 4 * PIECE_UNIT * (num_tokens + 1)


@pytest.mark.parametrize("isa", KERNELS)
@given(data=st.data())
def test_merged_parts_are_the_whole(data: st.DataObject, isa: Isa) -> None:
    sizes = [16 * n for n in data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))]
    tokens, total = data.draw(st.integers(1, 5)), sum(sizes)
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    q, k, v = (torch.randn(n, h, 16, generator=generator) * 3
               for n, h in ((tokens, 6), (total, 2), (total, 2)))  # fmt: skip
    with restricted(isa):
        parts = [
            attend_part(q, keys, values, is_causal=False)
            for keys, values in zip(k.split(sizes), v.split(sizes), strict=True)
        ]
    found = parts[0]
    for part in parts[1:]:
        found = merge(found, part)
    k, v = k.repeat_interleave(3, 1), v.repeat_interleave(3, 1)
    scores = torch.einsum("qhd,khd->hqk", q.double(), k.double()) / 4
    wanted = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v.double())
    # Sums of up to 48 products in fp32, outputs of size ~10.
    assert torch.allclose(found.out_THD.double(), wanted, atol=1e-4)
    assert torch.allclose(found.scale_TH.T.double(), scores.logsumexp(-1), atol=1e-4)


def prompt_of(length: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(7)
    return tuple(torch.randint(0, 300, (length,), generator=generator).tolist())


def run(core: EngineCore, tokens: tuple[int, ...], **params: Any) -> Generation:
    core.add(GenerateRequest(request_id="a", prompt_ids=tokens, params=SamplingParams(**params)))
    ended: Any = []
    while core.has_work:
        ended += core.step()
        core.check()
    (generation,) = [outcome for _, outcome in ended]
    assert isinstance(generation, Generation)
    return generation


def core_of(decoder: Decoder, **limits: Any) -> EngineCore:
    sizes = CoreLimits(num_pages=32, page_size=16)._replace(**limits)
    return EngineCore(decoder.config, decoder.state_dict(), limits=sizes, dtype=torch.float32)


@pytest.mark.slow
def test_processes_compute_the_engines_own_keys_and_values(
    make_decoder: Callable[..., Decoder],
) -> None:
    decoder, tokens = make_decoder(qk_norm=True), prompt_of(203)
    plain = core_of(decoder)
    wanted = run(plain, tokens, max_tokens=12, seed=5)
    with RingPrefill(
        decoder.config, decoder.state_dict(), num_workers=3, dtype=torch.float32, timeout_s=120
    ) as ring:
        layers = ring.prefill(tokens)
        short = ring.prefill(tokens[:4])
        assert [tuple(each.k_TKD.shape) for each in short] == [(4, 2, 16)] * 3
    core = core_of(decoder)
    assert core.adopt(tokens, layers) == 192
    found = run(core, tokens, max_tokens=12, seed=5)
    assert found.cached_tokens == 192
    assert found.token_ids == wanted.token_ids
    # fp32 through three layers, summed in another order.
    assert found.logprobs == pytest.approx(wanted.logprobs, abs=1e-4)
    ours, theirs = (
        core._cache.save_pages(range(32))  # type: ignore[union-attr]
        for core in (plain, core)
    )
    by_content = [
        sorted(float(page.float().abs().sum()) for page in layers[0]) for layers in (ours, theirs)
    ]
    assert by_content[0] == pytest.approx(by_content[1], rel=1e-4)


def test_a_killed_worker_is_named_and_nobody_waits_for_it(
    make_decoder: Callable[..., Decoder],
) -> None:
    decoder = make_decoder()
    ring = RingPrefill(decoder.config, decoder.state_dict(), num_workers=2, timeout_s=60)
    pids = ring.pids
    os.kill(pids[1], signal.SIGKILL)
    with pytest.raises(ClassifiedFailure, match=rf"worker 1 \(process {pids[1]}\) was killed by"):
        ring.prefill(prompt_of(100))
    with pytest.raises(ClassifiedFailure, match="worker 1"):
        ring.prefill(prompt_of(100))
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.slow
def test_a_stopped_worker_is_named_after_the_deadline(
    make_decoder: Callable[..., Decoder],
) -> None:
    decoder = make_decoder()
    ring = RingPrefill(decoder.config, decoder.state_dict(), num_workers=2, timeout_s=60)
    ring._timeout_s = 1.0
    os.kill(ring.pids[0], signal.SIGSTOP)
    with pytest.raises(ClassifiedFailure, match="no answer from prefill worker 0, 1 in 1 s"):
        ring.prefill(prompt_of(64))


def test_a_worker_that_cannot_start_says_why(
    make_decoder: Callable[..., Decoder],
) -> None:
    decoder = make_decoder()
    state = decoder.state_dict() | {"norm.weight": torch.full((64,), torch.nan)}
    with pytest.raises(ClassifiedFailure, match=r"prefill worker \d: .*not finite"):
        RingPrefill(decoder.config, state, num_workers=1, timeout_s=60)


def test_what_would_not_be_the_engines_own_numbers_is_refused(
    make_decoder: Callable[..., Decoder],
) -> None:
    decoder = make_decoder(sliding_window=8)
    with pytest.raises(UserError, match="sliding windows"):
        RingPrefill(decoder.config, decoder.state_dict(), num_workers=2)
    core = core_of(make_decoder(), kv=KvPolicy(kind="window"))  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"engine\.kv\.policy = window cannot take over"):
        core.adopt(prompt_of(20), [])
