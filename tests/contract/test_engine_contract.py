"""What every engine owes its callers; each backend is an entry of BACKENDS."""

import asyncio
from collections.abc import Awaitable
from contextlib import aclosing
from typing import Any

import pytest
from engine_backends import CONFIG, Backend, state

from burnish.core.errors import ClassifiedFailure, UserError
from burnish.core.records import GenerateRequest, SamplingParams
from burnish.core.vocabulary import EngineFeature, FailureKind, InFlight, StopReason

PROMPT = (1, 2, 3, 4)


def request(name: str, prompt_ids: tuple[int, ...] = PROMPT, **params: Any) -> GenerateRequest:
    values = {"max_tokens": 6, "seed": 3} | params
    return GenerateRequest(request_id=name, prompt_ids=prompt_ids, params=SamplingParams(**values))


async def refused(backend: Backend, feature: EngineFeature, call: Awaitable[Any]) -> bool:
    """Whether an engine that lacks a feature said so; False if it has it and nothing was called."""
    if feature in backend.engine.capabilities.features:
        return False
    with pytest.raises(UserError, match="cannot"):
        await call
    return True


def test_every_token_has_a_logprob_and_a_version(play: Any) -> None:
    async def scenario(backend: Backend) -> None:
        (got,) = await backend.ask(request("a"))
        assert got.request_id == "a"
        assert len(got.token_ids) == len(got.logprobs) == len(got.weight_versions) == 6
        assert all(0 <= token < CONFIG.vocab_size for token in got.token_ids)
        assert all(value <= 0.0 for value in got.logprobs)
        assert set(got.weight_versions) == {backend.engine.weight_version} == {4}
        assert got.stop_reason is StopReason.LENGTH

    play(scenario)


def test_the_same_seed_gives_the_same_tokens_and_another_seed_others(play: Any) -> None:
    async def scenario(backend: Backend) -> None:
        if EngineFeature.SEEDS not in backend.engine.capabilities.features:
            return
        one, two = await backend.ask(request("a", seed=1), request("b", seed=2))
        (again,) = await backend.ask(request("c", seed=1))
        assert one.token_ids == again.token_ids
        assert one.token_ids != two.token_ids

    play(scenario)


def test_a_stop_token_is_kept_and_named_as_the_reason(play: Any) -> None:
    async def scenario(backend: Backend) -> None:
        (free,) = await backend.ask(request("a", temperature=0.0))
        stop = free.token_ids[2]
        (got,) = await backend.ask(request("b", temperature=0.0, stop_token_ids=(stop,)))
        assert got.token_ids == free.token_ids[: free.token_ids.index(stop) + 1]
        assert got.stop_reason is StopReason.STOP

    play(scenario)


def test_sampled_logprobs_agree_with_the_score(play: Any) -> None:
    async def scenario(backend: Backend) -> None:
        if EngineFeature.SCORE not in backend.engine.capabilities.features:
            await refused(backend, EngineFeature.SCORE, backend.engine.score(PROMPT))
            return
        (got,) = await backend.ask(request("a"))
        scores = await backend.engine.score((*PROMPT, *got.token_ids))
        assert scores[0] == 0.0
        assert got.logprobs == pytest.approx(scores[4:], abs=0.05)

    play(scenario)


def test_the_score_is_the_log_of_a_distribution(play: Any) -> None:
    async def scenario(backend: Backend) -> None:
        if EngineFeature.SCORE not in backend.engine.capabilities.features:
            await refused(backend, EngineFeature.SCORE, backend.engine.score(PROMPT))
            return
        total = 0.0
        prefix = PROMPT[:2]
        asked = [backend.engine.score((*prefix, token)) for token in range(CONFIG.vocab_size)]
        for scores in await asyncio.gather(*asked):
            total += 2.718281828459045 ** scores[-1]
        assert total == pytest.approx(1.0, abs=0.02)

    play(scenario)


def test_logprobs_are_those_of_the_truncated_distribution(play: Any) -> None:
    async def scenario(backend: Backend) -> None:
        ask = backend.ask(request("a", top_p=0.01))
        if EngineFeature.SAMPLED_LOGPROBS not in backend.engine.capabilities.features:
            with pytest.raises(UserError, match="log-probs"):
                await ask
            return
        (got,) = await ask
        assert got.logprobs == pytest.approx([0.0] * 6, abs=1e-6)

    play(scenario)


def test_the_likeliest_tokens_come_best_first(play: Any) -> None:
    async def scenario(backend: Backend) -> None:
        ask = backend.ask(request("a", num_top_logprobs=3, temperature=0.0))
        if await refused(backend, EngineFeature.TOP_LOGPROBS, ask):
            return
        (got,) = await ask
        assert len(got.top_logprobs) == 6
        for token, logprob, top in zip(got.token_ids, got.logprobs, got.top_logprobs, strict=True):
            assert [v for _, v in top] == sorted((v for _, v in top), reverse=True)
            assert len(top) == 3
            assert top[0] == (token, pytest.approx(logprob, abs=1e-6))

    play(scenario)


def test_prompt_logprobs_are_the_score_of_the_prompt(play: Any) -> None:
    async def scenario(backend: Backend) -> None:
        asked = GenerateRequest(
            request_id="a",
            prompt_ids=(9, 8, 7, 6),
            params=SamplingParams(max_tokens=1),
            prompt_logprobs=True,
        )
        ask = backend.ask(asked)
        if await refused(backend, EngineFeature.PROMPT_LOGPROBS, ask):
            return
        (got,) = await ask
        scores = await backend.engine.score((9, 8, 7, 6))
        assert got.prompt_logprobs == pytest.approx(scores, abs=0.05)

    play(scenario)


def test_a_stream_delivers_every_token_once_and_ends_with_the_whole(play: Any) -> None:
    async def scenario(backend: Backend) -> None:
        if backend.barrier is not None:
            backend.barrier.enter()
        tokens: list[int] = []
        logprobs: list[float] = []
        whole = None
        async with aclosing(backend.engine.stream(request("a", max_tokens=20))) as deltas:
            async for delta in deltas:
                assert whole is None
                tokens += delta.token_ids
                logprobs += delta.logprobs
                whole = delta.generation
        if backend.barrier is not None:
            backend.barrier.leave()
        assert whole is not None
        assert (tuple(tokens), tuple(logprobs)) == (whole.token_ids, whole.logprobs)
        assert len(tokens) == 20

    play(scenario)


def test_new_weights_answer_once_the_update_has_returned(play: Any) -> None:
    async def scenario(backend: Backend) -> None:
        engine = backend.engine
        update = engine.update_weights(state(1), 9)
        if await refused(backend, EngineFeature.UPDATE_WEIGHTS, update):
            return
        probe = (5, 6, 7, 8)
        old = await engine.score(probe)
        await update
        assert engine.weight_version == 9
        assert await engine.score(probe) != old
        (got,) = await backend.ask(request("a"))
        assert set(got.weight_versions) == {9}
        await engine.update_weights(state(0), 10)
        assert await engine.score(probe) == pytest.approx(old, abs=0.01)

    play(scenario)


@pytest.mark.parametrize("inflight", InFlight)
def test_a_running_request_survives_an_update_with_honest_versions(
    play: Any, inflight: InFlight
) -> None:
    async def scenario(backend: Backend) -> None:
        engine = backend.engine
        listed = engine.capabilities.features
        if EngineFeature.UPDATE_WEIGHTS not in listed or backend.barrier is not None:
            return
        assert EngineFeature(f"inflight_{inflight}") in listed
        seen = 0
        whole = None
        async with aclosing(engine.stream(request("a", max_tokens=120))) as deltas:
            async for delta in deltas:
                seen += len(delta.token_ids)
                whole = delta.generation
                if seen >= 3 and engine.weight_version == 4:
                    await engine.update_weights(state(1), 9, inflight)
        assert whole is not None
        versions = whole.weight_versions
        assert list(versions) == sorted(versions)
        assert versions[0] == 4
        if inflight is InFlight.ABORT:
            assert set(versions) == {4}
            assert whole.stop_reason is StopReason.ABORTED or len(versions) == 120
        else:
            assert whole.stop_reason is StopReason.LENGTH
            assert len(versions) == 120
            assert set(versions) <= {4, 9}

    play(scenario)


def test_an_older_version_and_weights_of_another_shape_are_refused(play: Any) -> None:
    async def scenario(backend: Backend) -> None:
        engine = backend.engine
        if EngineFeature.UPDATE_WEIGHTS not in engine.capabilities.features:
            return
        with pytest.raises(UserError, match="not newer"):
            await engine.update_weights(state(1), 4)
        wrong = dict(state(1))
        name = next(iter(wrong))
        wrong[name] = wrong[name][:-1]
        with pytest.raises(UserError):
            await engine.update_weights(wrong, 9)
        (got,) = await backend.ask(request("a"))
        assert set(got.weight_versions) == {4}

    play(scenario)


def test_a_paused_engine_takes_requests_and_answers_them_later(play: Any) -> None:
    async def scenario(backend: Backend) -> None:
        pause = backend.engine.pause()
        if await refused(backend, EngineFeature.PAUSE, pause):
            return
        await pause
        task = asyncio.ensure_future(backend.ask(request("a")))
        done, _ = await asyncio.wait([task], timeout=0.2)
        assert not done
        await backend.engine.resume()
        (got,) = await task
        assert len(got.token_ids) == 6

    play(scenario)


def test_a_cancelled_caller_leaves_the_engine_usable(play: Any) -> None:
    async def scenario(backend: Backend) -> None:
        task = asyncio.ensure_future(backend.ask(request("a", max_tokens=100)))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        (got,) = await backend.ask(request("b"))
        assert len(got.token_ids) == 6

    play(scenario)


BAD = {
    "an empty prompt": request("x", ()),
    "a token that the model does not have": request("x", (1, 120)),
    "a negative token": request("x", (-1,)),
    "a prompt longer than the window": request("x", (1,) * 128),
    "no tokens asked for": request("x", max_tokens=0),
    "a negative temperature": request("x", temperature=-1.0),
    "an endless temperature": request("x", temperature=float("inf")),
    "a temperature that is no number": request("x", temperature=float("nan")),
    "an empty nucleus": request("x", top_p=0.0),
    "a negative top-k": request("x", top_k=-1),
    "min-p of one": request("x", min_p=1.0),
    "an empty stop string": request("x", stop=("",)),
    "more least tokens than tokens": request("x", min_tokens=9),
    "an unknown adapter": GenerateRequest(
        request_id="x", prompt_ids=PROMPT, params=SamplingParams(), adapter="nobody"
    ),
}


def test_what_could_never_run_is_refused_and_the_rest_goes_on(play: Any) -> None:
    async def scenario(backend: Backend) -> None:
        good = asyncio.ensure_future(backend.ask(request("good", max_tokens=60)))
        answered = []
        for what, bad in BAD.items():
            try:
                await backend.engine.generate(bad)
            except UserError:
                continue
            answered.append(what)
        assert not answered
        (got,) = await good
        assert len(got.token_ids) == 60

    play(scenario)


def test_a_closed_engine_refuses_and_closing_twice_is_harmless(play: Any) -> None:
    async def scenario(backend: Backend) -> None:
        await backend.engine.close()
        await backend.engine.close()
        with pytest.raises(ClassifiedFailure) as caught:
            await backend.engine.generate(request("late"))
        assert caught.value.failure.kind is FailureKind.INFRA

    play(scenario)
