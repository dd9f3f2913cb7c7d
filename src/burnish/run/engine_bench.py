"""How fast an engine is here: a quick look for users, not a comparison.

Random prompts that share nothing, sampled at temperature 1 to a fixed length. A batch's tokens are
counted from its first token to its last, so that reading the prompts has its own figures.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
from collections.abc import Callable, Sequence
from contextlib import aclosing
from itertools import pairwise
from typing import NamedTuple

from burnish.core.clock import Clock
from burnish.core.records import GenerateRequest, Grammar, Record, SamplingParams
from burnish.core.vocabulary import GrammarKind
from burnish.run.engines import RunEngine

# The tokens of special meaning come first in most vocabularies.
_FIRST_ORDINARY_ID = 64


class BatchFigures(Record, frozen=True, kw_only=True):
    """Requests that came at once."""

    batch: int
    """How many."""
    prompt_tokens: int
    """Of each."""
    new_tokens: int
    """Of each."""
    tokens_per_s: float
    """Sampled tokens per second, all together, after the first one."""
    first_token_p50_s: float
    """From arrival to the first token, median."""
    first_token_p95_s: float
    """The same, of the slowest 5 %."""
    inter_token_p50_s: float
    """Between two tokens of one request, median."""
    inter_token_p95_s: float
    """The same, of the slowest 5 %."""
    used_page_ratio: float | None
    """Share of the key/value cache in use at the fullest moment; None where servers do not tell."""
    grammar: str = ""
    """What texts were held to."""
    acceptance_ratio: float | None = None
    """Share of guessed tokens that were right; None if none was guessed."""
    mask_ms: float = 0.0
    """Time per step that the engine waited for what the grammar allows."""
    tier_read_bytes: int = 0
    """Keys and values read from disk."""
    tier_written_bytes: int = 0
    """Keys and values written to disk."""


class PrefillFigures(Record, frozen=True, kw_only=True):
    """One long prompt."""

    prompt_tokens: int
    """Its length."""
    tokens_per_s: float
    """Prompt tokens read per second."""
    first_token_s: float
    """From arrival to the first token."""


class EngineFigures(Record, frozen=True, kw_only=True):
    """Everything that was measured."""

    engine: str
    """Which one."""
    batches: tuple[BatchFigures, ...]
    """By batch size."""
    prefills: tuple[PrefillFigures, ...]
    """By length."""
    skipped: tuple[str, ...]
    """What did not fit, and why."""


class BenchPlan(NamedTuple):
    """What to measure."""

    batches: tuple[int, ...] = (1, 4, 16, 64)
    """Batch sizes."""
    prompt_tokens: int = 128
    """Of each request of a batch."""
    new_tokens: int = 64
    """Of each request of a batch."""
    prefills: tuple[int, ...] = (512, 2048)
    """Prompt lengths."""
    held_batches: tuple[int, ...] = (1, 16)
    """Batch sizes of texts held to a JSON schema, where the engine can do that."""


QUICK = BenchPlan(
    batches=(1, 8), prompt_tokens=64, new_tokens=16, prefills=(512,), held_batches=(8,)
)
# Longer than any text here: it never ends by itself.
_ENDLESS = {"type": "array", "items": {"type": "integer"}, "minItems": 4096}


async def bench_engine(
    engine: RunEngine,
    plan: BenchPlan,
    *,
    vocab_size: int,
    num_cache_tokens: int | None,
    clock: Clock,
    progress: Callable[[str], None],
) -> EngineFigures:
    """Measure an engine that nobody else uses.

    Args:
        engine: started.
        plan: sizes.
        vocab_size: prompts are drawn from it.
        num_cache_tokens: what fits into its cache; None if that is not known.
        clock: measures.
        progress: told of every measurement before it begins.

    Raises:
        UserError: the engine refuses such requests.
        ClassifiedFailure: it failed.
    """
    bench = _Bench(engine, clock, vocab_size)
    context = engine.capabilities.max_context_tokens
    skipped: list[str] = []

    def fits(name: str, length: int, number: int = 1) -> bool:
        if length > context:
            skipped.append(f"{name}: {length} tokens do not fit a context of {context}")
        elif num_cache_tokens is not None and length * number > num_cache_tokens:
            skipped.append(f"{name}: {length * number} tokens do not fit the cache")
        else:
            return True
        return False

    await bench.batch(1, min(8, context - 2), 2)
    batches, prefills = [], []
    for number in plan.batches:
        if fits(f"batch {number}", plan.prompt_tokens + plan.new_tokens, number):
            progress(f"batch {number}")
            batches.append(await bench.batch(number, plan.prompt_tokens, plan.new_tokens))
    if GrammarKind.JSON_SCHEMA in engine.capabilities.grammars:
        held = Grammar(kind=GrammarKind.JSON_SCHEMA, text=json.dumps(_ENDLESS))
        for number in plan.held_batches:
            if fits(f"batch {number}, JSON", plan.prompt_tokens + plan.new_tokens, number):
                progress(f"batch {number}, JSON")
                batches.append(await bench.batch(number, plan.prompt_tokens, plan.new_tokens, held))
    for length in plan.prefills:
        if fits(f"prefill {length}", length + 1):
            progress(f"prefill {length}")
            prefills.append(await bench.prefill(length))
    return EngineFigures(
        engine=engine.capabilities.name,
        batches=tuple(batches),
        prefills=tuple(prefills),
        skipped=tuple(skipped),
    )


class _Bench:
    def __init__(self, engine: RunEngine, clock: Clock, vocab_size: int) -> None:
        self._engine, self._clock, self._vocab_size = engine, clock, vocab_size
        self._random = random.Random(0)
        self._number = 0

    async def batch(
        self, number: int, prompt_tokens: int, new_tokens: int, grammar: Grammar | None = None
    ) -> BatchFigures:
        requests = [self._request(prompt_tokens, new_tokens, grammar) for _ in range(number)]
        before = self._engine.stats()
        fullest = _Fullest(self._engine)
        start_s = self._clock.now_s()
        times = await asyncio.gather(*(self._times(r, fullest) for r in requests))
        first = [row[0] - start_s for row in times]
        # Tokens that come together share the time since the last ones.
        gaps = [later - earlier for row in times for earlier, later in pairwise(row)]
        begin_s, end_s = min(row[0] for row in times), max(row[-1] for row in times)
        decoded = sum(len(row) for row in times) - number
        after = self._engine.stats()
        guesses = after.drafted_tokens - before.drafted_tokens
        right = after.accepted_tokens - before.accepted_tokens
        # Servers do not count steps, and tell no time of masks.
        steps = max(1, (after.num_steps or 0) - (before.num_steps or 0))
        return BatchFigures(
            batch=number,
            prompt_tokens=prompt_tokens,
            new_tokens=new_tokens,
            tokens_per_s=decoded / (end_s - begin_s) if end_s > begin_s else 0.0,
            first_token_p50_s=statistics.median(first),
            first_token_p95_s=_p95(first),
            inter_token_p50_s=statistics.median(gaps) if gaps else 0.0,
            inter_token_p95_s=_p95(gaps) if gaps else 0.0,
            used_page_ratio=fullest.ratio,
            grammar="" if grammar is None else "JSON",
            acceptance_ratio=right / guesses if guesses else None,
            mask_ms=1e3 * (after.mask_s - before.mask_s) / steps,
            tier_read_bytes=after.tier.read_bytes - before.tier.read_bytes,
            tier_written_bytes=after.tier.written_bytes - before.tier.written_bytes,
        )

    async def prefill(self, length: int) -> PrefillFigures:
        start_s = self._clock.now_s()
        times = await self._times(self._request(length, 1), _Fullest(self._engine))
        seconds = times[0] - start_s
        return PrefillFigures(
            prompt_tokens=length,
            tokens_per_s=length / seconds if seconds > 0 else 0.0,
            first_token_s=seconds,
        )

    def _request(
        self, prompt_tokens: int, new_tokens: int, grammar: Grammar | None = None
    ) -> GenerateRequest:
        self._number += 1
        low = min(_FIRST_ORDINARY_ID, self._vocab_size // 2)
        ids = tuple(self._random.randrange(low, self._vocab_size) for _ in range(prompt_tokens))
        params = SamplingParams(max_tokens=new_tokens, seed=self._number, grammar=grammar)
        return GenerateRequest(request_id=f"bench/{self._number}", prompt_ids=ids, params=params)

    async def _times(self, request: GenerateRequest, fullest: _Fullest) -> list[float]:
        """When each token came."""
        times: list[float] = []
        async with aclosing(self._engine.stream(request)) as deltas:
            async for delta in deltas:
                times += [self._clock.now_s()] * len(delta.token_ids)
                fullest.look()
        return times


class _Fullest:
    """The fullest that the cache was."""

    def __init__(self, engine: RunEngine) -> None:
        self._engine = engine
        self.ratio: float | None = None

    def look(self) -> None:
        now = self._engine.stats().used_page_ratio
        if now is not None:
            self.ratio = max(self.ratio or 0.0, now)


def _p95(values: Sequence[float]) -> float:
    """The value that 95 % do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]
