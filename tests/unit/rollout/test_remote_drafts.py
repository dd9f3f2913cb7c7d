"""What servers guess, as far as they say."""

import asyncio
from collections.abc import Callable, Iterator

import pytest
from engine_backends import CONFIG, connect, state
from engine_server import EngineServer

from burnish.rollout.remote.counters import Counters
from burnish.rollout.remote.dialect import Drafts, ServerCounts

DEADLINE_S = 60.0


def page(drafted: float, accepted: float, preempted: int = 0) -> str:
    return (
        'vllm:num_requests_running{engine="0"} 3.0\n'
        'vllm:num_requests_running{engine="1"} 2.0\n'
        'vllm:num_requests_waiting{engine="0"} 0.0\n'
        'vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 9.0\n'
        'vllm:kv_cache_usage_perc{engine="0"} 0.25\n'
        'vllm:kv_cache_usage_perc{engine="1"} 0.75\n'
        f'vllm:num_preemptions_total{{engine="0"}} {preempted}.0\n'
        "# TYPE vllm:spec_decode_num_draft_tokens counter\n"
        f'vllm:spec_decode_num_draft_tokens_total{{engine="0",model_name="a b"}} {drafted}\n'
        'vllm:spec_decode_num_draft_tokens_total{engine="1",model_name="a b"} 1.0\n'
        'vllm:spec_decode_num_draft_tokens_created{engine="0"} 1.7e+09\n'
        f'vllm:spec_decode_num_accepted_tokens_total{{engine="0"}} {accepted}\n'
        'vllm:spec_decode_num_accepted_tokens_per_pos_total{position="0"} 77.0\n'
    )


async def until(holds: Callable[[], bool]) -> None:
    """Lets other tasks run until something holds; the test's deadline ends it."""
    while not holds():  # noqa: ASYNC110 - it happens in the loop of another thread.
        await asyncio.sleep(0.01)


@pytest.fixture
def server() -> Iterator[EngineServer]:
    started = EngineServer("vllm", CONFIG, state(0))
    yield started
    started.stop()


def test_guesses_count_from_the_first_look_on(server: EngineServer) -> None:
    server.metrics = page(100, 50)
    engine = connect("vllm", server.url)

    async def scenario() -> None:
        await until(lambda: engine.stats().num_preemptions == 0)
        assert engine.stats().drafted_tokens == 0
        server.metrics = page(130, 74, 4)
        await until(lambda: engine.stats().num_preemptions == 4)
        stats = engine.stats()
        assert (stats.drafted_tokens, stats.accepted_tokens) == (30, 24)
        assert stats.acceptance_ratio == 0.8
        assert (stats.num_running, stats.num_waiting, stats.num_preemptions) == (5, 0, 4)
        assert stats.used_page_ratio == 0.5
        assert stats.num_steps is stats.num_swaps is stats.free_pages is stats.saved_bytes is None

    async def main() -> None:
        try:
            async with asyncio.timeout(DEADLINE_S):
                await scenario()
        finally:
            await engine.close()

    asyncio.run(main())


@pytest.mark.parametrize("text", ["", "vllm:spec_decode_num_draft_tokens_total{} nothing\n"])
def test_a_page_without_counters_counts_nothing(server: EngineServer, text: str) -> None:
    server.metrics = text
    engine = connect("vllm", server.url)

    async def main() -> None:
        wire, dialect = engine._fleet.replicas[0].wire, engine._dialect
        assert await engine._run(lambda: dialect.counts(wire, 10.0)) == ServerCounts()
        await engine.close()

    asyncio.run(main())


def test_a_server_that_was_started_anew_counts_from_nothing() -> None:
    counters = Counters()
    for drafts in (Drafts(10, 5), Drafts(14, 8), Drafts(3, 2), None, Drafts(4, 2)):
        counters.note("one", ServerCounts(drafts=drafts))
    assert counters.drafts == Drafts(4 + 3 + 1, 3 + 2 + 0)
    for number in (7, 9, 2, None, 3):
        counters.note("one", ServerCounts(num_preemptions=number))
    assert counters.num_preemptions == 2 + 2 + 1


def test_what_a_server_said_is_forgotten_when_it_answers_no_more() -> None:
    counters = Counters()
    counters.note("one", ServerCounts(num_running=3, num_waiting=2, used_page_ratio=0.9))
    counters.note("two", ServerCounts(num_running=4, used_page_ratio=0.3))
    now = counters.snapshot(uptime_s=1.0, busy_s=0.0, num_outstanding=0, num_adapters=0)
    assert (now.num_running, now.num_waiting, now.used_page_ratio) == (7, 2, 0.9)
    counters.note("one", None)
    now = counters.snapshot(uptime_s=1.0, busy_s=0.0, num_outstanding=0, num_adapters=0)
    assert (now.num_running, now.num_waiting, now.used_page_ratio) == (4, None, 0.3)


def test_hits_of_the_prefix_cache_are_unknown_until_a_server_tells_any() -> None:
    counters = Counters()
    idle = {"uptime_s": 1.0, "busy_s": 0.0, "num_outstanding": 0, "num_adapters": 0}
    assert counters.snapshot(**idle).prefix_hit_ratio is None
    counters.prompt_tokens, counters.cached_tokens, counters.tells_cached = 30, 10, True
    assert counters.snapshot(**idle).prefix_hit_ratio == 0.25
