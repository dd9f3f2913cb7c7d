"""What every engine owes its callers about LoRA adapters and grammars."""

import asyncio
import json
import re
from collections.abc import Awaitable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_backends import CONFIG, IN_FP32, VERSION, Backend, random_lora, state
from engine_tokenizer import END, tiny_tokenizer

from burnish.core.errors import UserError
from burnish.core.records import GenerateRequest, Generation, Grammar, SamplingParams
from burnish.core.vocabulary import EngineFeature, GrammarKind, StopReason
from burnish.model.lora import Lora, merged
from burnish.model.lora_directory import save_lora
from burnish.rollout.engine.engine import EngineCore
from burnish.rollout.engine.limits import CoreLimits

# Answers are compared with a reference in fp32.
pytestmark = pytest.mark.parametrize("play", IN_FP32, indirect=True)
PROMPT = (5, 6, 7, 8)
FOX = {"type": "object", "properties": {"fox": {"enum": [1, 2]}}, "required": ["fox"]}
GRAMMARS = {
    GrammarKind.JSON_SCHEMA: json.dumps(FOX | {"additionalProperties": False}),
    GrammarKind.REGEX: "(ab|cd){2,4}",
    GrammarKind.LARK: 'start: "no" | "yes"',
}
MATCHES = {
    GrammarKind.JSON_SCHEMA: r'\s*\{\s*"fox"\s*:\s*[12]\s*\}\s*',
    GrammarKind.REGEX: GRAMMARS[GrammarKind.REGEX],
    GrammarKind.LARK: "no|yes",
}


def ask_for(name: str, adapter: str | None, **params: Any) -> GenerateRequest:
    values = {"max_tokens": 8, "temperature": 0.0} | params
    return GenerateRequest(
        request_id=name, prompt_ids=PROMPT, params=SamplingParams(**values), adapter=adapter
    )


def wanted(seed: int, lora: Lora | None) -> Generation:
    """What the weights with the adapter in them answer."""
    weights = state(seed) if lora is None else merged(state(seed), lora)
    limits = CoreLimits(num_pages=64, page_size=8)
    core = EngineCore(CONFIG, weights, dtype=torch.float32, limits=limits)
    core.add(ask_for("wanted", None))
    while core.has_work:
        ((_, answer),) = core.step() or [(None, None)]
    assert isinstance(answer, Generation)
    return answer


def is_answer(got: Generation, seed: int, lora: Lora | None) -> bool:
    expected = wanted(seed, lora)
    near = got.logprobs == pytest.approx(expected.logprobs, abs=0.02)
    return got.token_ids == expected.token_ids and near


def written(folder: Path, seed: int, rank: int = 4) -> Lora:
    lora = random_lora(seed, rank)
    save_lora(lora, folder, CONFIG)
    return lora


async def can_load(backend: Backend, directory: Path) -> bool:
    """Whether it loads adapters; one that cannot must say so."""
    if EngineFeature.LOAD_ADAPTERS in backend.engine.capabilities.features:
        return True
    for call in (backend.engine.load_adapter("x", directory), backend.engine.remove_adapter("x")):
        await _refused(call)
    return False


async def _refused(call: Awaitable[Any]) -> None:
    with pytest.raises(UserError, match="cannot do load_adapters"):
        await call


def test_an_adapter_answers_as_merged_weights_do_and_only_who_names_it(
    play: Any, tmp_path: Path
) -> None:
    one, two = (written(tmp_path / str(seed), seed) for seed in (1, 2))

    async def scenario(backend: Backend) -> None:
        engine = backend.engine
        if not await can_load(backend, tmp_path / "1"):
            return
        await engine.load_adapter("one", tmp_path / "1")
        await engine.load_adapter("two", tmp_path / "2")
        assert {"one", "two"} <= set(engine.adapters)
        asked = [ask_for(str(name), name) for name in (None, "one", "two")]
        for got, lora in zip(await backend.ask(*asked), (None, one, two), strict=True):
            assert is_answer(got, 0, lora)
            assert set(got.weight_versions) == {VERSION}

    play(scenario)


def test_what_a_server_was_started_with_can_be_named(play: Any) -> None:
    async def scenario(backend: Backend) -> None:
        for name in backend.engine.adapters:
            base, got = await backend.ask(ask_for("a", None), ask_for("b", name))
            assert is_answer(base, 0, None)
            assert is_answer(got, 0, random_lora(1))
            assert set(got.weight_versions) == {VERSION}

    play(scenario)


def test_a_known_name_gets_newer_weights_and_keeps_them(play: Any, tmp_path: Path) -> None:
    one, two = (written(tmp_path / str(seed), seed) for seed in (1, 2))

    async def scenario(backend: Backend) -> None:
        engine = backend.engine
        if not await can_load(backend, tmp_path / "1"):
            return
        await engine.load_adapter("x", tmp_path / "1", 7)
        (got,) = await backend.ask(ask_for("a", "x"))
        assert is_answer(got, 0, one)
        assert set(got.weight_versions) == {7}
        for version in (None, 6, 7):
            with pytest.raises(UserError, match="not newer"):
                await engine.load_adapter("x", tmp_path / "2", version)
        await engine.load_adapter("x", tmp_path / "2", 8)
        (got,) = await backend.ask(ask_for("b", "x"))
        assert is_answer(got, 0, two)
        assert set(got.weight_versions) == {8}
        if EngineFeature.UPDATE_WEIGHTS in engine.capabilities.features:
            await engine.update_weights(state(1), 9)
            base, got = await backend.ask(ask_for("c", None), ask_for("d", "x"))
            assert is_answer(base, 1, None)
            assert is_answer(got, 1, two)
            assert set(got.weight_versions) == {9}

    play(scenario)


def test_a_running_request_survives_new_weights_of_its_adapter_with_honest_versions(
    play: Any, tmp_path: Path
) -> None:
    for seed in (1, 2):
        written(tmp_path / str(seed), seed)

    async def scenario(backend: Backend) -> None:
        engine = backend.engine
        if not await can_load(backend, tmp_path / "1") or backend.barrier is not None:
            return
        await engine.load_adapter("x", tmp_path / "1", 7)
        whole, is_newer = None, False
        async with aclosing(engine.stream(ask_for("a", "x", max_tokens=100))) as deltas:
            async for delta in deltas:
                whole = delta.generation
                if not is_newer:
                    is_newer = True
                    await engine.load_adapter("x", tmp_path / "2", 8)
        assert whole is not None
        assert whole.stop_reason is StopReason.LENGTH
        versions = whole.weight_versions
        assert versions[0] == 7
        assert list(versions) == sorted(versions)
        assert set(versions) <= {7, 8}

    play(scenario)


def test_a_removed_adapter_is_unknown_and_its_name_free(play: Any, tmp_path: Path) -> None:
    written(tmp_path / "1", 1)
    two = written(tmp_path / "2", 2)

    async def scenario(backend: Backend) -> None:
        engine = backend.engine
        if not await can_load(backend, tmp_path / "1"):
            return
        await engine.load_adapter("x", tmp_path / "1")
        await engine.remove_adapter("x")
        assert "x" not in engine.adapters
        for call in (engine.generate(ask_for("a", "x")), engine.remove_adapter("x")):
            with pytest.raises(UserError, match="adapter 'x'"):
                await call
        await engine.load_adapter("x", tmp_path / "2")
        (got,) = await backend.ask(ask_for("b", "x"))
        assert is_answer(got, 0, two)

    play(scenario)


def test_what_is_no_adapter_of_the_model_is_refused_and_changes_nothing(
    play: Any, tmp_path: Path
) -> None:
    one = written(tmp_path / "good", 1)
    for name in ("dora", "rank", "torn"):
        written(tmp_path / name, 2)
    for name, change in (("dora", {"use_dora": True}), ("rank", {"r": 3})):
        path = tmp_path / name / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | change))
    (tmp_path / "torn" / "adapter_model.safetensors").write_bytes(b"\x00" * 40)

    async def scenario(backend: Backend) -> None:
        engine = backend.engine
        if not await can_load(backend, tmp_path / "good"):
            return
        await engine.load_adapter("x", tmp_path / "good", 5)
        for name in ("dora", "rank", "torn", "missing"):
            with pytest.raises(UserError, match="adapter"):
                await engine.load_adapter("x", tmp_path / name, 6)
        with pytest.raises(UserError, match="name"):
            await engine.load_adapter("", tmp_path / "good")
        (got,) = await backend.ask(ask_for("a", "x"))
        assert is_answer(got, 0, one)
        assert set(got.weight_versions) == {5}

    play(scenario)


def test_an_adapter_of_too_large_a_rank_is_refused(play: Any, tmp_path: Path) -> None:
    written(tmp_path / "9", 1, rank=9)

    async def scenario(backend: Backend) -> None:
        if backend.engine.capabilities.max_adapter_rank == 8:
            with pytest.raises(UserError, match="rank 9"):
                await backend.engine.load_adapter("x", tmp_path / "9")
            assert "x" not in backend.engine.adapters

    play(scenario)


@pytest.mark.parametrize("kind", GrammarKind)
def test_a_text_conforms_to_its_grammar_and_ends_with_it(play: Any, kind: GrammarKind) -> None:
    grammar = Grammar(kind=kind, text=GRAMMARS[kind])

    async def scenario(backend: Backend) -> None:
        listed = backend.engine.capabilities
        assert bool(listed.grammars) == (EngineFeature.GRAMMAR in listed.features)
        params = {"grammar": grammar, "max_tokens": 60, "stop_token_ids": (END,)}
        asked = [
            ask_for(f"{seed}", None, seed=seed, temperature=1.0, **params) for seed in range(4)
        ]
        if kind not in listed.grammars:
            with pytest.raises(UserError, match="cannot do grammar"):
                await backend.engine.generate(asked[0])
            return
        free = ask_for("free", None, seed=1, temperature=1.0, max_tokens=60)
        *held, plain = await backend.ask(*asked, free)
        assert len(plain.token_ids) == 60
        for got in held:
            assert got.stop_reason is StopReason.STOP
            assert got.token_ids[-1] == END
            text = tiny_tokenizer(CONFIG.vocab_size).decode(list(got.token_ids[:-1]))
            assert re.fullmatch(MATCHES[kind], text), text
            assert len(got.logprobs) == len(got.token_ids)
            if EngineFeature.UNMASKED_LOGPROBS in listed.features:
                scores = await backend.engine.score((*PROMPT, *got.token_ids))
                assert got.unmasked_logprobs == pytest.approx(scores[4:], abs=0.05)
                pairs = zip(got.logprobs, got.unmasked_logprobs, strict=True)
                assert all(masked >= plain - 1e-4 for masked, plain in pairs)
            else:
                assert got.unmasked_logprobs == ()

    play(scenario)


def test_a_malformed_grammar_is_refused_and_the_rest_goes_on(play: Any) -> None:
    broken = Grammar(kind=GrammarKind.REGEX, text="[a")

    async def scenario(backend: Backend) -> None:
        if EngineFeature.GRAMMAR not in backend.engine.capabilities.features:
            return
        good = asyncio.ensure_future(backend.ask(ask_for("good", None, max_tokens=40)))
        with pytest.raises(UserError):
            await backend.engine.generate(ask_for("bad", None, grammar=broken))
        (got,) = await good
        assert len(got.token_ids) == 40

    play(scenario)
