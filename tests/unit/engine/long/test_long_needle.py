"""A long haystack in little memory: a model of written-down weights finds every pair."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from burnish.core.records import GenerateRequest, Generation, SamplingParams
from burnish.core.vocabulary import KvPolicyKind
from burnish.model.kernels.library import Isa, kernels
from burnish.rollout.engine.engine import EngineCore
from burnish.rollout.engine.limits import CoreLimits
from burnish.rollout.engine.long.policy import KvPolicy
from burnish.rollout.engine.tier.limits import TierLimits

RETRIEVER = Path(__file__).parents[4] / "benchmarks/long/retriever.py"
TOKENS, DEPTHS = 20_000, 11


@pytest.fixture(scope="module")
def retriever() -> ModuleType:
    spec = importlib.util.spec_from_file_location("retriever", RETRIEVER)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["retriever"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.skipif(sys.platform != "linux", reason="the disk tier needs Linux")
@pytest.mark.skipif(kernels().isa is Isa.TORCH, reason="slow without native kernels")
@pytest.mark.parametrize("kind", [KvPolicyKind.QUEST, KvPolicyKind.WINDOW])
def test_every_needle_is_found_within_the_budget(retriever: ModuleType, kind: KvPolicyKind) -> None:
    kv = KvPolicy(
        kind=kind,
        budget_tokens=1024,
        prefill_window=256 if kind is KvPolicyKind.QUEST else 0,
    )
    config, hay = retriever.config_of(TOKENS + 64), retriever.haystack(TOKENS, DEPTHS)
    # 20 MB of keys and values, 4 MiB of them in memory.
    tier = TierLimits(4 << 20, 64 << 20)
    limits = CoreLimits(
        num_pages=TOKENS // 64 + 32, page_size=64, budget_tokens=1024, kv=kv, tier=tier
    )
    core = EngineCore(config, retriever.weights_of(config), limits=limits)
    found = [key_is_answered(core, hay.body, key, value) for key, value in hay.pairs]
    stats = core.tier
    core.close()
    assert stats.ram_bytes <= tier.ram_bytes
    if kind is KvPolicyKind.QUEST:
        assert all(found)
        assert stats.disk_bytes > 12 << 20
        return
    # Proof that the needles are far: a window finds those at its two ends alone.
    assert found == [True] + [False] * (DEPTHS - 2) + [True]


def key_is_answered(core: EngineCore, body: list[int], key: int, value: int) -> bool:
    params = SamplingParams(max_tokens=1, temperature=0.0)
    core.add(GenerateRequest(request_id="q", prompt_ids=(*body, key), params=params))
    ended: list[Any] = []
    while core.has_work:
        ended += core.step()
    ((_, generation),) = ended
    assert isinstance(generation, Generation)
    return generation.token_ids == (value,)
