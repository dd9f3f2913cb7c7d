"""What of an engine's counters becomes a step's metrics."""

from typing import Any

from burnish.core.vocabulary import NoDraft
from burnish.rollout.engine.stats import EngineStats
from burnish.rollout.engine.tier.limits import TierStats
from burnish.rollout.remote.counters import Counters
from burnish.run.engine_report import record_engine
from burnish.telemetry.catalogue import CATALOGUE
from burnish.telemetry.metrics import Recorder

IDLE = {"uptime_s": 10.0, "busy_s": 5.0, "num_outstanding": 0}


def stats(**values: Any) -> EngineStats:
    return Counters().snapshot(**IDLE, num_adapters=0)._replace(**values)


def metrics(old: EngineStats, new: EngineStats) -> dict[str, float]:
    recorder = Recorder(CATALOGUE)
    record_engine(recorder, old, new, 2.0)
    return {
        f"{sample.name}/{sample.label}" if sample.label else sample.name: sample.value
        for sample in recorder.take()
    }


def test_what_is_not_in_use_is_not_reported() -> None:
    words = ("adapt", "grammar", "mask", "tier", "accepted", "unguessed", "gap")
    assert not [name for name in metrics(stats(), stats()) if any(w in name for w in words)]


def test_each_step_reports_what_happened_in_it() -> None:
    old = stats(
        adapted_tokens=5,
        held_tokens=7,
        mask_s=1.0,
        kv_gap_nats=1.0,
        kv_gap_tokens=10,
        drafted_tokens=10,
        accepted_tokens=9,
        undrafted=((NoDraft.NO_MATCH, 3),),
        tier=TierStats(hits=10, misses=10, read_bytes=100, written_bytes=50, prefetched=4),
    )
    new = stats(
        num_adapters=2,
        adapted_tokens=15,
        held_tokens=27,
        mask_s=1.5,
        kv_gap_nats=4.0,
        kv_gap_tokens=16,
        drafted_tokens=20,
        accepted_tokens=13,
        undrafted=((NoDraft.NO_MATCH, 8),),
        tier=TierStats(
            ram_bytes=64,
            disk_bytes=32,
            hits=40,
            misses=20,
            read_bytes=300,
            written_bytes=90,
            prefetched=9,
            prefetch_useful=3,
        ),
    )
    found = metrics(old, new)
    wanted = {
        "engine_adapters": 2,
        "engine_adapted_tokens": 10,
        "engine_grammar_tokens": 20,
        "engine_mask_s": 0.5,
        "engine_kv_gap": 0.5,
        "engine_accepted_ratio": 0.4,
        "engine_guesses/accepted": 4,
        "engine_guesses/rejected": 6,
        "engine_unguessed/no_match": 5,
        "engine_tier_bytes/ram": 64,
        "engine_tier_bytes/disk": 32,
        "engine_tier_traffic_bytes/read": 200,
        "engine_tier_traffic_bytes/written": 40,
        "engine_tier_hit_ratio": 0.75,
        "engine_tier_prefetched/read": 5,
        "engine_tier_prefetched/useful": 3,
    }
    assert {name: found.get(name) for name in wanted} == wanted


def test_what_servers_do_not_tell_is_absent_and_not_zero() -> None:
    silent = metrics(stats(), stats(prompt_tokens=10))
    for name in ("preemptions", "used_page", "cached", "waiting"):
        assert not [each for each in silent if name in each], name
    assert silent["queue_depth/engine_requests"] == 0
    found = metrics(
        stats(cached_tokens=2),
        stats(
            prompt_tokens=6, cached_tokens=4, num_preemptions=3, num_waiting=0, used_page_ratio=0.0
        ),
    )
    assert found["cached_token_ratio"] == 0.25
    assert found["queue_depth/engine_waiting"] == 0
    assert found["engine_used_page_ratio"] == 0
    assert found["engine_preemptions/recompute"] == 3
    assert "engine_preemptions/swap" not in found
