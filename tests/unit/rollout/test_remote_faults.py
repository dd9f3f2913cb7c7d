"""Servers that die, hang, lie and come back: what a client makes of each."""

import asyncio
import shutil
import ssl
import subprocess
from collections.abc import Awaitable, Callable, Iterator
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any

import pytest
from engine_backends import CONFIG, VERSION, connect, state
from engine_server import EngineServer

from burnish.core.errors import ClassifiedFailure, UserError
from burnish.core.records import GenerateRequest, SamplingParams
from burnish.core.vocabulary import EngineFeature, FailureKind, InFlight
from burnish.rollout.remote.dialect import LogprobScope
from burnish.rollout.remote.engine import RemoteEngine
from burnish.rollout.remote.failures import RemoteFailure, RemoteProblem
from burnish.rollout.remote.replica import ReplicaState

DEADLINE_S = 60.0
NEVER_S = 1e6


def request(name: str, **params: Any) -> GenerateRequest:
    values = {"max_tokens": 12, "seed": 3} | params
    return GenerateRequest(
        request_id=name, prompt_ids=(1, 2, 3, 4), params=SamplingParams(**values)
    )


@pytest.fixture
def servers() -> Iterator[Callable[..., list[EngineServer]]]:
    """Starts servers of a kind."""
    started: list[EngineServer] = []

    def start(kind: str, number: int = 1) -> list[EngineServer]:
        started.extend(EngineServer(kind, CONFIG, state(0)) for _ in range(number))
        return started[-number:]

    yield start
    for server in started:
        with suppress(RuntimeError):
            server.stop()


def play(engine: RemoteEngine, scenario: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        try:
            async with asyncio.timeout(DEADLINE_S):
                await scenario()
        finally:
            await engine.close()

    asyncio.run(main())


def problem(caught: pytest.ExceptionInfo[RemoteFailure]) -> RemoteProblem:
    assert caught.value.failure.kind is FailureKind.INFRA
    return caught.value.problem


async def until(holds: Callable[[], bool]) -> None:
    """Lets other tasks run until something holds; the test's deadline ends it."""
    while not holds():  # noqa: ASYNC110 - it happens in the loop of another thread.
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("kind", ["vllm", "sglang", "openai"])
def test_a_broken_connection_costs_no_token(servers: Any, kind: str) -> None:
    one, two = servers(kind, 2)
    engine = connect(kind, one.url, two.url, health_interval_s=NEVER_S)
    one.seen.clear()

    async def scenario() -> None:
        one.faults.drop_after = 5
        got = await engine.generate(request("a", temperature=0.0))
        assert len(got.token_ids) == 12
        asked = [
            body.get("token_ids") or body.get("input_ids") or body.get("prompt")
            for body in (*one.seen, *two.seen)
        ]
        assert [1, 2, 3, 4, *got.token_ids[:5]] in asked
        scores = await engine.score((1, 2, 3, 4, *got.token_ids))
        assert got.logprobs == pytest.approx(scores[4:], abs=0.01)

    play(engine, scenario)


def test_without_another_replica_the_failure_is_typed(servers: Any) -> None:
    (server,) = servers("vllm")
    engine = connect("vllm", server.url, health_interval_s=NEVER_S)

    async def scenario() -> None:
        server.faults.drop_after = 3
        with pytest.raises(RemoteFailure) as caught:
            await engine.generate(request("a"))
        assert problem(caught) is RemoteProblem.NOBODY
        assert server.url in str(caught.value)

    play(engine, scenario)


def test_a_stop_string_may_lie_across_the_seam_so_such_a_request_does_not_move(
    servers: Any,
) -> None:
    one, two = servers("vllm", 2)
    engine = connect("vllm", one.url, two.url, health_interval_s=NEVER_S)

    async def scenario() -> None:
        one.faults.drop_after = 3
        with pytest.raises(RemoteFailure) as caught:
            await engine.generate(request("a", stop=("never",)))
        assert problem(caught) is RemoteProblem.LOST

    play(engine, scenario)


def test_silence_is_a_timeout_with_the_limit_in_its_message(servers: Any) -> None:
    (server,) = servers("vllm")
    engine = connect(
        "vllm", server.url, silence_timeout_s=1.0, health_interval_s=NEVER_S, max_moves=0
    )

    async def scenario() -> None:
        server.faults.silent_after = 2
        with pytest.raises(RemoteFailure, match="within 1 s") as caught:
            await engine.generate(request("a"))
        assert problem(caught) is RemoteProblem.TIMEOUT

    play(engine, scenario)


def test_bytes_that_are_no_json_are_malformed(servers: Any) -> None:
    (server,) = servers("vllm")
    engine = connect("vllm", server.url, health_interval_s=NEVER_S)

    async def scenario() -> None:
        server.faults.garbage = True
        with pytest.raises(RemoteFailure) as caught:
            await engine.generate(request("a"))
        assert problem(caught) is RemoteProblem.MALFORMED
        server.faults.garbage = False
        assert len((await engine.generate(request("b"))).token_ids) == 12

    play(engine, scenario)


def test_an_overloaded_server_is_asked_again(servers: Any) -> None:
    (server,) = servers("vllm")
    engine = connect("vllm", server.url, health_interval_s=NEVER_S)

    async def scenario() -> None:
        server.faults.status = 503
        task = asyncio.ensure_future(engine.generate(request("a")))
        await until(lambda: len(server.seen) > 0 and server.seen[-1]["stream"] is True)
        server.faults.status = None
        assert len((await task).token_ids) == 12

    server.seen.clear()
    play(engine, scenario)


def test_cancelling_hangs_up_and_the_server_stops_sampling(servers: Any) -> None:
    (server,) = servers("vllm")
    engine = connect("vllm", server.url)

    async def scenario() -> None:
        async with aclosing(engine.stream(request("a", max_tokens=100))) as deltas:
            await anext(deltas)
            assert server.running == 1
        await until(lambda: server.running == 0)
        assert engine.stats().num_outstanding == 0

    play(engine, scenario)


def test_a_token_is_demanded_and_given_from_file_or_environment(
    servers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (server,) = servers("vllm")
    server.faults.token = "s3cret"
    with pytest.raises(UserError, match="refuses access"):
        connect("vllm", server.url)
    file = tmp_path / "token"
    file.write_text("s3cret\n")
    asyncio.run(connect("vllm", server.url, token_file=file).close())
    monkeypatch.setenv("ENGINE_TOKEN", "s3cret")
    asyncio.run(connect("vllm", server.url, token_env="ENGINE_TOKEN").close())
    with pytest.raises(UserError, match="holds no token"):
        connect("vllm", server.url, token_env="NOT_SET_AT_ALL")


def test_a_private_authority_is_trusted_if_its_certificate_is_given(tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("no openssl to make a certificate: sudo apt-get install openssl")
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    make = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    make += ["-nodes", "-subj", "/CN=test", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*make, "-keyout", str(key), "-out", str(cert)], check=True, capture_output=True)
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(cert, key)
    server = EngineServer("vllm", CONFIG, state(0), tls)
    try:
        asyncio.run(connect("vllm", server.url, ca_file=cert).close())
        with pytest.raises(UserError, match="certificate is not trusted"):
            connect("vllm", server.url)
        with pytest.raises(UserError, match="holds no certificates"):
            connect("vllm", server.url, ca_file=key)
        with pytest.raises(ClassifiedFailure):
            connect("vllm", server.url.replace("https", "http"))
    finally:
        server.stop()


@pytest.mark.parametrize(
    "url", ["", "localhost:8000", "ftp://host", "http://user@host", "http://host/?a=b", "http://[x"]
)
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(UserError, match=r"engine\.remote\.urls"):
        connect("vllm", url)


def test_a_server_that_is_not_there_is_named() -> None:
    with pytest.raises(ClassifiedFailure, match=r"http://127\.0\.0\.1:9"):
        connect("vllm", "http://127.0.0.1:9")


@pytest.mark.parametrize(("speaks", "asked"), [("sglang", "vllm"), ("openai", "vllm")])
def test_a_server_of_another_kind_is_refused_with_the_fix(
    servers: Any, speaks: str, asked: str
) -> None:
    (server,) = servers(speaks)
    with pytest.raises(UserError, match="Fix"):
        connect(asked, server.url)


def test_logprobs_of_another_distribution_are_refused_before_anything_is_sent(
    servers: Any,
) -> None:
    (server,) = servers("openai")
    engine = connect("openai", server.url)

    async def scenario() -> None:
        assert engine.scope is LogprobScope.SAMPLED
        engine._fleet.scope = LogprobScope.RAW
        number = len(server.seen)
        for params in ({"temperature": 0.5}, {"top_p": 0.9}):
            with pytest.raises(UserError, match="log-probs"):
                await engine.generate(request("a", **params))
        assert len(server.seen) == number
        await engine.generate(request("b"))

    play(engine, scenario)


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_weights_that_did_not_arrive_are_an_error(servers: Any, kind: str) -> None:
    (server,) = servers(kind)
    engine = connect(kind, server.url, health_interval_s=NEVER_S)

    async def scenario() -> None:
        await engine.synchronize(state(0))
        server.faults.ignores_updates = True
        with pytest.raises(RemoteFailure, match="exactly as before") as caught:
            await engine.update_weights(state(1), 9)
        assert problem(caught) is RemoteProblem.NOT_DELIVERED
        assert engine.weight_version == VERSION

    play(engine, scenario)


def test_the_same_weights_again_are_no_error(servers: Any) -> None:
    (server,) = servers("vllm")
    engine = connect("vllm", server.url)

    async def scenario() -> None:
        await engine.synchronize(state(0))
        await engine.update_weights(state(0), 9)
        assert engine.weight_version == 9

    play(engine, scenario)


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_a_replica_that_fails_to_load_serves_nothing_until_it_has(servers: Any, kind: str) -> None:
    good, bad = servers(kind, 2)
    engine = connect(kind, good.url, bad.url)

    async def scenario() -> None:
        bad.faults.refuses_updates = True
        await engine.update_weights(state(1), 9)
        assert engine.weight_version == 9
        bad.seen.clear()
        for name in "abcd":
            got = await engine.generate(request(name))
            assert set(got.weight_versions) == {9}
        assert not [body for body in bad.seen if body.get("stream")]
        bad.faults.refuses_updates = False
        replicas = engine._fleet.replicas
        await until(lambda: replicas[1].state is ReplicaState.READY)
        assert await engine.score((5, 6, 7)) is not None
        assert bad.label.endswith("-9")

    play(engine, scenario)


def test_a_server_that_was_started_anew_is_given_its_weights_before_it_serves(
    servers: Any,
) -> None:
    one, two = servers("vllm", 2)
    engine = connect("vllm", one.url, two.url)

    async def scenario() -> None:
        await engine.update_weights(state(1), 9)
        expected = await engine.score((5, 6, 7, 8))
        await asyncio.to_thread(one.stop)
        replicas = engine._fleet.replicas
        await until(lambda: replicas[0].state is ReplicaState.DOWN)
        assert set((await engine.generate(request("a"))).weight_versions) == {9}
        await asyncio.to_thread(one.restart)
        await until(lambda: replicas[0].state is ReplicaState.READY)
        assert await engine.score((5, 6, 7, 8)) == pytest.approx(expected, abs=0.01)

    play(engine, scenario)


def test_tokens_of_weights_that_somebody_else_loaded_are_refused(servers: Any) -> None:
    (server,) = servers("vllm")
    engine = connect("vllm", server.url, health_interval_s=NEVER_S)

    async def scenario() -> None:
        server.label = "somebody else's"
        with pytest.raises(RemoteFailure) as caught:
            await engine.generate(request("a"))
        assert problem(caught) is RemoteProblem.OUTDATED

    play(engine, scenario)


def test_prefixes_are_shared_within_one_version_only(servers: Any) -> None:
    (server,) = servers("vllm")
    engine = connect("vllm", server.url)

    async def scenario() -> None:
        server.seen.clear()
        await engine.generate(request("a"))
        await engine.generate(request("b"))
        await engine.update_weights(state(1), 9)
        await engine.generate(request("c"))
        salts = [body["cache_salt"] for body in server.seen if body.get("stream")]
        assert salts[0] == salts[1] != salts[2]

    play(engine, scenario)


def test_replicas_that_disagree_are_an_error(servers: Any) -> None:
    one, two = servers("vllm", 2)
    engine = connect("vllm", one.url, two.url, health_interval_s=NEVER_S, agreement_nats=0.1)

    async def scenario() -> None:
        assert EngineFeature.SCORE in engine.capabilities.features
        await engine.score((5, 6, 7))
        await two.engine.update_weights(state(1), 1, InFlight.KEEP)
        with pytest.raises(RemoteFailure, match="nats") as caught:
            await engine.score((5, 6, 7))
        assert problem(caught) is RemoteProblem.DISAGREE

    play(engine, scenario)


def test_looking_after_replicas_never_disturbs_an_update(servers: Any) -> None:
    (server,) = servers("vllm")
    engine = connect("vllm", server.url, health_interval_s=0.001)

    async def scenario() -> None:
        for version in range(5, 15):
            await engine.update_weights(state(version), version)
        assert server.num_pauses == 10

    play(engine, scenario)


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_an_update_that_nobody_waits_for_still_lets_the_server_go_on(
    servers: Any, kind: str
) -> None:
    (server,) = servers(kind)
    engine = connect(kind, server.url, health_interval_s=NEVER_S)

    async def scenario() -> None:
        server.may_load.clear()
        task = asyncio.ensure_future(engine.update_weights(state(1), 9))
        await until(lambda: server.is_paused)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        closing = asyncio.ensure_future(engine.close())
        server.may_load.set()
        await closing
        assert not server.is_paused

    play(engine, scenario)
