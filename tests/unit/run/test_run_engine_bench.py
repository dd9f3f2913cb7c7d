"""The quick measure of an engine: its arithmetic under a clock that the engine moves."""

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

from burnish.core.clock import ManualClock
from burnish.core.records import GenerateRequest, Generation, GenerationDelta
from burnish.core.vocabulary import GrammarKind, StopReason
from burnish.observe.engine_chart import Line, Panel, chart
from burnish.run.engine_bench import BenchPlan, bench_engine


class Metronome:
    """One token per tick of a second, after two seconds of reading."""

    def __init__(self, clock: ManualClock) -> None:
        self.clock = clock
        self.capabilities = SimpleNamespace(
            name="metronome", max_context_tokens=600, grammars=frozenset({GrammarKind.JSON_SCHEMA})
        )
        self.prompts: list[tuple[int, ...]] = []
        self.num_steps = self.num_held = 0

    def stats(self) -> Any:
        steps = self.num_steps
        return SimpleNamespace(
            used_page_ratio=0.25,
            num_steps=steps,
            mask_s=0.5 * self.num_held,
            drafted_tokens=4 * steps,
            accepted_tokens=3 * steps,
            tier=SimpleNamespace(read_bytes=20 * steps, written_bytes=10 * steps),
        )

    async def stream(self, request: GenerateRequest) -> AsyncIterator[GenerationDelta]:
        self.prompts.append(request.prompt_ids)
        self.clock.advance(2.0)
        for number in range(request.params.max_tokens):
            if number:
                self.clock.advance(1.0)
            self.num_steps += 1
            self.num_held += request.params.grammar is not None
            last = number == request.params.max_tokens - 1
            yield GenerationDelta(
                request_id=request.request_id,
                token_ids=(7,),
                logprobs=(0.0,),
                weight_versions=(0,),
                generation=Generation(
                    request_id=request.request_id,
                    token_ids=(),
                    logprobs=(),
                    weight_versions=(),
                    stop_reason=StopReason.LENGTH,
                )
                if last
                else None,
            )


def figures(plan: BenchPlan, *, num_cache_tokens: int | None = None) -> tuple[Any, Metronome]:
    clock = ManualClock()
    engine: Any = Metronome(clock)
    found = asyncio.run(
        bench_engine(
            engine,
            plan,
            vocab_size=1000,
            num_cache_tokens=num_cache_tokens,
            clock=clock,
            progress=lambda text: None,
        )
    )
    return found, engine


def test_a_batch_is_timed_from_its_first_token_to_its_last() -> None:
    found, engine = figures(BenchPlan(batches=(1,), prefills=(500,), held_batches=()))
    (batch,), (prefill,) = found.batches, found.prefills
    assert (batch.first_token_p50_s, batch.inter_token_p95_s) == (2.0, 1.0)
    assert batch.tokens_per_s == 1.0
    assert batch.used_page_ratio == 0.25
    assert (prefill.tokens_per_s, prefill.first_token_s) == (250.0, 2.0)
    assert len(set(engine.prompts)) == len(engine.prompts)


def test_what_does_not_fit_is_left_out_and_named() -> None:
    found, _ = figures(
        BenchPlan(batches=(1, 64), prefills=(512, 2048), held_batches=()), num_cache_tokens=1000
    )
    assert [batch.batch for batch in found.batches] == [1]
    assert [prefill.prompt_tokens for prefill in found.prefills] == [512]
    assert len(found.skipped) == 2
    assert "batch 64" in found.skipped[0]
    assert "context of 600" in found.skipped[1]


def test_guesses_masks_and_the_disk_are_those_of_the_batch() -> None:
    found, _ = figures(BenchPlan(batches=(2,), prefills=(), new_tokens=8, held_batches=(2,)))
    plain, held = found.batches
    assert (plain.grammar, held.grammar) == ("", "JSON")
    assert (plain.mask_ms, held.mask_ms) == (0.0, 500.0)
    for batch in (plain, held):
        assert batch.acceptance_ratio == 0.75
        assert (batch.tier_read_bytes, batch.tier_written_bytes) == (320, 160)


def test_the_picture_is_well_formed_and_shows_every_value() -> None:
    lines = (Line("a < b", ((1, 10.0), (16, 123.0))), Line("empty", ()))
    panels = (Panel("Speed & more", "x", "tok/s", lines), Panel("none", "x", "ms", (Line("", ()),)))
    text = chart("model <x>", panels)
    root = ElementTree.fromstring(text)
    words = " ".join(element.text or "" for element in root.iter())
    for word in (
        "model <x>",
        "Speed & more",
        "a < b",
        "10 tok/s",
        "123 tok/s",
        "tok/s, logarithmic axes",
    ):
        assert word in words
    assert "none" not in words
    for element in root.iter():
        for name in ("x", "y", "cx", "cy"):
            if name in element.attrib:
                assert 0 <= float(element.attrib[name]) <= 900
