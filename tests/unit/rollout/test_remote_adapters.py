"""Servers that lose adapters, refuse them, ignore them or mix them up."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
from engine_backends import CONFIG, connect, random_lora, state
from engine_server import EngineServer

from burnish.core.errors import UserError
from burnish.core.records import GenerateRequest, Grammar, SamplingParams
from burnish.core.vocabulary import EngineFeature, GrammarKind
from burnish.model.lora import Lora
from burnish.model.lora_directory import save_lora
from burnish.rollout.remote.adapters import OWN_PREFIX
from burnish.rollout.remote.delivery import PROBE_IDS
from burnish.rollout.remote.engine import RemoteEngine
from burnish.rollout.remote.failures import RemoteFailure, RemoteProblem
from burnish.rollout.remote.replica import ReplicaState

DEADLINE_S = 60.0
NEVER_S = 1e6


def request(name: str, adapter: str | None, **params: Any) -> GenerateRequest:
    values = {"max_tokens": 8, "temperature": 0.0} | params
    return GenerateRequest(
        request_id=name,
        prompt_ids=(1, 2, 3, 4),
        params=SamplingParams(**values),
        adapter=adapter,
    )


@pytest.fixture
def servers() -> Iterator[Callable[..., list[EngineServer]]]:
    started: list[EngineServer] = []

    def start(kind: str, number: int = 1, **more: Any) -> list[EngineServer]:
        started.extend(EngineServer(kind, CONFIG, state(0), **more) for _ in range(number))
        return started[-number:]

    yield start
    for server in started:
        with suppress(RuntimeError):
            server.stop()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_lora(random_lora(1), tmp_path / "adapter", CONFIG)
    return tmp_path / "adapter"


def play(engine: RemoteEngine, scenario: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        try:
            async with asyncio.timeout(DEADLINE_S):
                await scenario()
        finally:
            await engine.close()

    asyncio.run(main())


async def until(holds: Callable[[], bool]) -> None:
    """Lets other tasks run until something holds; the test's deadline ends it."""
    while not holds():  # noqa: ASYNC110 - it happens in the loop of another thread.
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_a_server_that_was_started_anew_is_given_its_adapters_before_it_serves(
    servers: Any, folder: Path, kind: str
) -> None:
    one, two = servers(kind, 2)
    engine = connect(kind, one.url, two.url)

    async def scenario() -> None:
        await engine.load_adapter("x", folder)
        expected = await engine.generate(request("a", "x"))
        replicas = engine._fleet.replicas
        await asyncio.to_thread(one.stop)
        await until(lambda: replicas[0].state is ReplicaState.DOWN)
        await asyncio.to_thread(one.restart)
        await until(lambda: replicas[0].state is ReplicaState.READY)
        assert len(one.engine.adapters) == 1
        asked = [engine.generate(request(f"{i}", "x")) for i in range(4)]
        for got in await asyncio.gather(*asked):
            assert got.token_ids == expected.token_ids

    play(engine, scenario)


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_a_request_goes_on_elsewhere_if_a_server_has_lost_its_adapter(
    servers: Any, folder: Path, kind: str
) -> None:
    one, two = servers(kind, 2)
    engine = connect(kind, one.url, two.url, health_interval_s=NEVER_S)

    async def scenario() -> None:
        await engine.load_adapter("x", folder)
        expected = await engine.generate(request("a", "x"))
        await asyncio.to_thread(one.stop)
        await asyncio.to_thread(one.restart)
        got = await engine.generate(request("b", "x"))
        assert got.token_ids == expected.token_ids
        assert engine._fleet.replicas[0].state is ReplicaState.OUTDATED

    play(engine, scenario)


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_a_replica_that_does_not_take_an_adapter_serves_nothing_until_it_has(
    servers: Any, folder: Path, kind: str
) -> None:
    good, bad = servers(kind, 2)
    engine = connect(kind, good.url, bad.url)

    async def scenario() -> None:
        bad.faults.refuses_updates = True
        await engine.load_adapter("x", folder)
        bad.seen.clear()
        await asyncio.gather(*(engine.generate(request(f"{i}", "x")) for i in range(4)))
        assert not bad.seen
        bad.faults.refuses_updates = False
        replicas = engine._fleet.replicas
        await until(lambda: replicas[1].state is ReplicaState.READY)
        assert len(bad.engine.adapters) == 1

    play(engine, scenario)


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_an_adapter_that_changes_no_answer_did_not_arrive(
    servers: Any, folder: Path, kind: str
) -> None:
    (server,) = servers(kind)
    engine = connect(kind, server.url, health_interval_s=NEVER_S)

    async def scenario() -> None:
        # The server of these tests knows no salts: what it has computed once it finds again.
        await engine.generate(msgspec.structs.replace(request("warm", None), prompt_ids=PROBE_IDS))
        server.faults.ignores_updates = True
        with pytest.raises(RemoteFailure, match="exactly as without") as caught:
            await engine.load_adapter("x", folder)
        assert caught.value.problem is RemoteProblem.NOT_DELIVERED
        assert engine.adapters == ()

    play(engine, scenario)


def test_an_adapter_that_adds_nothing_yet_is_no_error(servers: Any, tmp_path: Path) -> None:
    (server,) = servers("vllm")
    engine = connect("vllm", server.url)
    lora = random_lora(1)
    fresh = tuple(
        {own: each._replace(up_OR=each.up_OR * 0) for own, each in layer.items()}
        for layer in lora.layers
    )
    save_lora(Lora(fresh), tmp_path / "fresh", CONFIG)

    async def scenario() -> None:
        await engine.load_adapter("x", tmp_path / "fresh")
        base, got = [await engine.generate(request(f"{n}", n)) for n in (None, "x")]
        assert base.token_ids == got.token_ids

    play(engine, scenario)


def test_a_server_that_mixes_up_rows_is_sent_every_request_through_an_adapter(
    servers: Any, folder: Path
) -> None:
    (server,) = servers("vllm")
    server.device = "cpu"
    engine = connect("vllm", server.url)

    async def scenario() -> None:
        assert EngineFeature.UPDATE_WEIGHTS not in engine.capabilities.features
        assert engine.adapters == ()
        await engine.load_adapter("x", folder)
        assert engine.adapters == ("x",)
        server.seen.clear()
        base, got = [await engine.generate(request(f"{n}", n)) for n in (None, "x")]
        assert base.token_ids != got.token_ids
        assert all(body["model"].startswith(OWN_PREFIX) for body in server.seen)
        for name in ("", "y"):
            with pytest.raises(UserError, match="no adapter"):
                await engine.generate(request("bad", name))

    play(engine, scenario)


def test_a_closed_client_leaves_no_adapter_behind_and_finds_none_of_another(
    servers: Any, folder: Path
) -> None:
    (server,) = servers("vllm", adapters={"own": folder, f"{OWN_PREFIX}dead-1": folder})
    engine = connect("vllm", server.url)

    async def scenario() -> None:
        assert engine.adapters == ("own",)
        await engine.load_adapter("x", folder)
        for call in (engine.load_adapter("own", folder), engine.remove_adapter("own")):
            with pytest.raises(UserError, match="started with"):
                await call
        assert len(server.cards()) == 4

    play(engine, scenario)
    assert {card["id"] for card in server.cards()} == {"m", "own", f"{OWN_PREFIX}dead-1"}


def test_a_grammar_would_begin_anew_elsewhere_so_such_a_request_does_not_move(
    servers: Any,
) -> None:
    one, two = servers("vllm", 2)
    engine = connect("vllm", one.url, two.url, health_interval_s=NEVER_S)
    grammar = Grammar(kind=GrammarKind.REGEX, text="[a-z]{40}")

    async def scenario() -> None:
        one.faults.drop_after = 3
        with pytest.raises(RemoteFailure):
            await engine.generate(request("a", None, max_tokens=60, grammar=grammar))
        assert not [body for body in two.seen if "structured_outputs" in body["sampling_params"]]

    play(engine, scenario)
