"""The engine's part of a step's metrics."""

from __future__ import annotations

from burnish.rollout.engine.stats import EngineStats
from burnish.rollout.engine.tier.limits import TierStats
from burnish.telemetry import catalogue as metric
from burnish.telemetry.metrics import Recorder


def record_engine(
    recorder: Recorder, old: EngineStats, new: EngineStats, elapsed_s: float
) -> float:
    """Record what the engine did between two snapshots; returns sampled tokens per wall second."""
    rate = (new.sampled_tokens - old.sampled_tokens) / elapsed_s
    recorder.record(metric.ENGINE_TOKENS_PER_S, rate)
    recorder.record(metric.ENGINE_BUSY_RATIO, min((new.busy_s - old.busy_s) / elapsed_s, 1.0))
    cached = (new.cached_tokens or 0) - (old.cached_tokens or 0)
    prompt = cached + new.prompt_tokens - old.prompt_tokens
    if prompt and new.cached_tokens is not None:
        recorder.record(metric.CACHED_TOKEN_RATIO, cached / prompt)
    recorder.record(metric.QUEUE_DEPTH, new.num_outstanding, "engine_requests")
    if new.num_waiting is not None:
        recorder.record(metric.QUEUE_DEPTH, new.num_waiting, "engine_waiting")
    if new.used_page_ratio is not None:
        recorder.record(metric.ENGINE_USED_PAGE_RATIO, new.used_page_ratio)
    _preemptions(recorder, old, new)
    recorder.record(metric.ENGINE_FAILED_REQUESTS, new.num_failed - old.num_failed)
    _guesses(recorder, old, new)
    _adapters_and_grammars(recorder, old, new)
    compared = new.kv_gap_tokens - old.kv_gap_tokens
    if compared:
        recorder.record(metric.ENGINE_KV_GAP, (new.kv_gap_nats - old.kv_gap_nats) / compared)
    _tier(recorder, old.tier, new.tier)
    _latencies(recorder, old, new)
    return rate


def _preemptions(recorder: Recorder, old: EngineStats, new: EngineStats) -> None:
    """Servers tell how many at most, and have only one way."""
    if new.num_preemptions is None:
        return
    # A server that is asked for the first time has told nothing before.
    preempted = new.num_preemptions - (old.num_preemptions or 0)
    swapped = 0
    if new.num_swaps is not None:
        swapped = new.num_swaps - (old.num_swaps or 0)
        recorder.record(metric.ENGINE_PREEMPTIONS, swapped, "swap")
    recorder.record(metric.ENGINE_PREEMPTIONS, preempted - swapped, "recompute")


def _guesses(recorder: Recorder, old: EngineStats, new: EngineStats) -> None:
    """Without speculation there is nothing to record."""
    drafted = new.drafted_tokens - old.drafted_tokens
    accepted = new.accepted_tokens - old.accepted_tokens
    if drafted:
        recorder.record(metric.ENGINE_ACCEPTED_RATIO, accepted / drafted)
        recorder.record(metric.ENGINE_GUESSES, accepted, "accepted")
        recorder.record(metric.ENGINE_GUESSES, drafted - accepted, "rejected")
    before = dict(old.undrafted)
    for reason, count in new.undrafted:
        recorder.record(metric.ENGINE_UNGUESSED, count - before.get(reason, 0), reason)


def _adapters_and_grammars(recorder: Recorder, old: EngineStats, new: EngineStats) -> None:
    """Only what is in use."""
    if new.num_adapters or old.num_adapters:
        recorder.record(metric.ENGINE_ADAPTERS, new.num_adapters)
        recorder.record(metric.ENGINE_ADAPTED_TOKENS, new.adapted_tokens - old.adapted_tokens)
    held = new.held_tokens - old.held_tokens
    if held:
        recorder.record(metric.ENGINE_GRAMMAR_TOKENS, held)
        recorder.record(metric.ENGINE_MASK_SECONDS, new.mask_s - old.mask_s)


def _tier(recorder: Recorder, old: TierStats, new: TierStats) -> None:
    """A cache without a disk never counts anything."""
    hits, misses = new.hits - old.hits, new.misses - old.misses
    if not (new.hits or new.misses):
        return
    recorder.record(metric.ENGINE_TIER_BYTES, new.ram_bytes, "ram")
    recorder.record(metric.ENGINE_TIER_BYTES, new.disk_bytes, "disk")
    recorder.record(metric.ENGINE_TIER_TRAFFIC, new.read_bytes - old.read_bytes, "read")
    recorder.record(metric.ENGINE_TIER_TRAFFIC, new.written_bytes - old.written_bytes, "written")
    if hits + misses:
        recorder.record(metric.ENGINE_TIER_HIT_RATIO, hits / (hits + misses))
    # A page that was read ahead in one step may be wanted in the next.
    useful = new.prefetch_useful - old.prefetch_useful
    recorder.record(metric.ENGINE_TIER_PREFETCHED, new.prefetched - old.prefetched, "read")
    recorder.record(metric.ENGINE_TIER_PREFETCHED, useful, "useful")


def _latencies(recorder: Recorder, old: EngineStats, new: EngineStats) -> None:
    """With a barrier nothing is timed, so there is nothing to record."""
    queue = new.queue.since(old.queue)
    first, between = new.first_token.since(old.first_token), new.inter_token.since(old.inter_token)
    if queue.num:
        recorder.record(metric.ENGINE_QUEUE_P95, queue.quantile_s(0.95))
    if first.num:
        recorder.record(metric.ENGINE_FIRST_TOKEN_MEAN, first.mean_s)
        recorder.record(metric.ENGINE_FIRST_TOKEN_P95, first.quantile_s(0.95))
    if between.num:
        recorder.record(metric.ENGINE_INTER_TOKEN_MEAN, between.mean_s)
        recorder.record(metric.ENGINE_INTER_TOKEN_P95, between.quantile_s(0.95))
