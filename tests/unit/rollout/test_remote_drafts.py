"""What servers guess, as far as they say."""

import asyncio
from collections.abc import Callable, Iterator

import pytest
from engine_backends import CONFIG, connect, state
from engine_server import EngineServer

from burnish.rollout.remote.counters import Counters
from burnish.rollout.remote.dialect import Drafts

DEADLINE_S = 60.0


def page(drafted: float, accepted: float) -> str:
    return (
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
        await until(lambda: bool(engine._fleet.counters._last_drafts))
        assert engine.stats().drafted_tokens == 0
        server.metrics = page(130, 74)
        await until(lambda: engine.stats().drafted_tokens > 0)
        stats = engine.stats()
        assert (stats.drafted_tokens, stats.accepted_tokens) == (30, 24)
        assert stats.acceptance_ratio == 0.8

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
        assert await engine._run(lambda: dialect.drafts(wire, 10.0)) is None
        await engine.close()

    asyncio.run(main())


def test_a_server_that_was_started_anew_counts_from_nothing() -> None:
    counters = Counters()
    for drafts in (Drafts(10, 5), Drafts(14, 8), Drafts(3, 2), None, Drafts(4, 2)):
        counters.note_drafts("one", drafts)
    assert counters.drafts == Drafts(4 + 3 + 1, 3 + 2 + 0)
