"""Speculation and grammars: tokens per second against the same engine without them.

    python benchmarks/speculation.py [--quick] [--only edit|grammar] [--cpu] [--json FILE]

The task is edit-like: the prompt holds a passage and an edited copy, and the model copies it once
more, greedy, no token ends it, batch 1. All engines run in turns in one process, in exact mode;
greedy output must be identical. The rows of grammars compare decoding with and without masks.
Ratios are medians of those of neighbouring runs.

Draft models are made of the model itself, as no smaller one with its tokenizer is at hand: its
first layers, every third of its layers, and all of them. None is trained to guess, so that few
guesses are right and the engine stops making them: what is shown is what that costs. All of the
layers guess right always and cost as much as the model: the price of drafting itself.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from burnish.core.clock import SystemClock
from burnish.core.records import GenerateRequest, Grammar, SamplingParams
from burnish.core.vocabulary import GrammarKind, NoDraft, Speculation
from burnish.model.loading import LoadedModel, load_model
from burnish.rollout.engine.engine import EngineCore
from burnish.rollout.engine.grammar import GrammarCompiler
from burnish.rollout.engine.limits import CoreLimits, SpeculationLimits
from burnish.rollout.engine.speculation.opening import DraftSource

PASSAGE = (
    "def area(width, height):\n    return width * height\n\n\n"
    "def perimeter(width, height):\n    return 2 * (width + height)\n\n\n"
    "def diagonal(width, height):\n    return (width ** 2 + height ** 2) ** 0.5\n\n\n"
    "def scaled(width, height, factor):\n    return width * factor, height * factor\n\n\n"
    "def is_square(width, height):\n    return width == height\n\n\n"
    "def inside(x, y, width, height):\n    return 0 <= x < width and 0 <= y < height\n\n\n"
)
STEP = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "count": {"type": "integer"}},
    "required": ["name", "count"],
}
# Long enough that no text ends within a run.
STEPS = {"type": "array", "items": STEP, "minItems": 50}
SCHEMA = {"type": "object", "properties": {"steps": STEPS}}
GRAMMARS = {
    "json": Grammar(
        kind=GrammarKind.JSON_SCHEMA, text=json.dumps(SCHEMA | {"required": ["steps"]})
    ),
    # Every character is a state of its own here: nothing that the library keeps can be used again.
    "counted": Grammar(kind=GrammarKind.REGEX, text="[a-z ,.]{400}"),
}


def edited(passage: str) -> str:
    """The same with small edits: one name in two functions."""
    return passage.replace("def area(width", "def surface(width").replace("factor", "ratio")


def kept_layers(loaded: LoadedModel, layers: Sequence[int]) -> DraftSource:
    """A model of its own, of some layers of another."""
    state = {}
    for name, tensor in loaded.decoder.state_dict().items():
        if not name.startswith("blocks."):
            state[name] = tensor
            continue
        _, number, rest = name.split(".", 2)
        if int(number) in layers:
            state[f"blocks.{layers.index(int(number))}.{rest}"] = tensor
    return DraftSource(msgspec.structs.replace(loaded.config, num_layers=len(layers)), state)


def core_for(
    loaded: LoadedModel, kind: Speculation, exact: bool, draft: DraftSource | None = None
) -> EngineCore:
    """An engine that guesses so."""
    return EngineCore(
        loaded.config,
        loaded.decoder.state_dict(),
        limits=CoreLimits(
            num_pages=1024, exact=exact, speculation=SpeculationLimits(kind=kind, max_tokens=12)
        ),
        grammars=GrammarCompiler(loaded.tokenizer.to_json(), loaded.config.vocab_size),
        draft=draft,
        clock=SystemClock(),
    )


def timed(
    core: EngineCore, prompt: tuple[int, ...], num: int, clock: Callable[[], float]
) -> tuple[float, tuple[int, ...]]:
    """Tokens per second after the prompt is read, and the tokens."""
    params = SamplingParams(temperature=0.0, max_tokens=num)
    sequence = core.add(GenerateRequest(request_id="edit/1", prompt_ids=prompt, params=params))
    while not sequence.num_sampled:
        core.step()
    first, start = sequence.num_sampled, clock()
    while core.has_work:
        core.step()
    seconds = clock() - start
    return (sequence.num_sampled - first) / seconds, tuple(sequence.tokens[len(prompt) :])


def guessers(loaded: LoadedModel) -> dict[str, EngineCore]:
    """Engines by who guesses; `off` first."""
    num_layers = loaded.config.num_layers
    kinds = (Speculation.OFF, Speculation.LOOKUP, Speculation.SELF)
    cores = {str(kind): core_for(loaded, kind, exact=True) for kind in kinds}
    for name, layers in (
        ("draft_first_third", range(num_layers // 3)),
        ("draft_every_third", range(0, num_layers, 3)),
        ("draft_all_layers", range(num_layers)),
    ):
        source = kept_layers(loaded, layers)
        cores[name] = core_for(loaded, Speculation.DRAFT, exact=True, draft=source)
    return cores


def speculation_rows(
    loaded: LoadedModel, runs: int, num: int, clock: Callable[[], float]
) -> list[dict[str, Any]]:
    """One row for each way of guessing."""
    text = edited(PASSAGE)
    prompt = tuple(loaded.tokenizer.encode(PASSAGE + text + PASSAGE[: len("def area(")] + "wi"))
    cores = guessers(loaded)
    names = list(cores)
    rates: dict[str, list[float]] = {name: [] for name in names}
    outputs: dict[str, tuple[int, ...]] = {}
    for i in range(runs):
        # Who runs first in a round must not always be the same.
        for name in names[i % len(names) :] + names[: i % len(names)]:
            cores[name].forget_prefixes()
            rate, outputs[name] = timed(cores[name], prompt, num, clock)
            rates[name].append(rate)
    rows = []
    for name in names[1:]:
        assert outputs[name] == outputs[names[0]], "guesses changed greedy output"
        pairs = zip(rates[name], rates[names[0]], strict=True)
        ratio = statistics.median(mine / plain for mine, plain in pairs)
        target = 2.0 if name == Speculation.LOOKUP else None
        rows.append(
            {
                "name": f"edit_{name}_batch_1",
                "value": round(statistics.median(rates[name]), 1),
                "unit": "tokens/s",
                "peer": "no speculation",
                "peer_value": round(statistics.median(rates[names[0]]), 1),
                "ratio": round(ratio, 3),
                "target": target,
                "ok": None if target is None else ratio >= target,
                "n": runs,
                "note": f"greedy output identical; {told(cores[name])}",
            }
        )
    return rows


def told(core: EngineCore) -> str:
    """What became of guesses."""
    counters = core.counters
    accepted = counters.accepted_tokens / max(1, counters.drafted_tokens)
    declined = dict(counters.undrafted).get(NoDraft.COST, 0)
    return (
        f"{accepted:.0%} of {counters.drafted_tokens} guesses accepted, {counters.num_steps} steps "
        f"for {counters.sampled_tokens} tokens; in {declined} guessing did not pay"
    )


def batch_rate(core: EngineCore, prompt: tuple[int, ...], batch: int, **params: Any) -> float:
    """Tokens per second of `batch` requests that decode together."""
    sequences = [
        core.add(
            GenerateRequest(
                request_id=f"{i}", prompt_ids=prompt, params=SamplingParams(seed=i, **params)
            )
        )
        for i in range(batch)
    ]
    while not all(sequence.num_sampled for sequence in sequences):
        core.step()
    first, start = core.counters.sampled_tokens, time.perf_counter()
    while core.has_work:
        core.step()
    return (core.counters.sampled_tokens - first) / (time.perf_counter() - start)


def grammar_row(
    core: EngineCore, prompt: tuple[int, ...], kind: str, batch: int, turns: int
) -> dict[str, Any]:
    """What masks cost a step."""
    plain: list[float] = []
    held: list[float] = []
    tokens = 48 if batch == 1 else 12
    # Short runs in turns: the machine's speed drifts by more than what is looked for.
    for i in range(turns):
        for params, rates in (({}, plain), ({"grammar": GRAMMARS[kind]}, held))[
            :: 1 if i % 2 else -1
        ]:
            rates.append(batch_rate(core, prompt, batch, max_tokens=tokens, **params))
    ratio = statistics.median(mine / other for mine, other in zip(held, plain, strict=True))
    return {
        "name": f"grammar_{kind}_batch_{batch}",
        "value": round(statistics.median(held), 1),
        "unit": "tokens/s",
        "peer": "no grammar",
        "peer_value": round(statistics.median(plain), 1),
        "ratio": round(ratio, 3),
        "target": 0.95,
        "ok": ratio >= 0.95,
        "n": turns,
        "note": "median of the ratios of neighbouring runs",
    }


def main() -> None:
    """Measure and write rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", choices=("edit", "grammar"))
    parser.add_argument("--cpu", action="store_true", help="edit: CPU seconds of one thread")
    arguments = parser.parse_args()
    torch.set_num_threads(1 if arguments.cpu else arguments.threads)
    clock = time.thread_time if arguments.cpu else time.perf_counter
    loaded = load_model("smollm2-135m-instruct")
    runs, num = (3, 96) if arguments.quick else (5, 256)
    rows = [] if arguments.only == "grammar" else speculation_rows(loaded, runs, num, clock)
    if arguments.only != "edit":
        core = core_for(loaded, Speculation.OFF, exact=True)
        prompt = tuple(loaded.tokenizer.encode(PASSAGE))
        rows += [
            grammar_row(core, prompt, kind, batch, turns)
            for kind in GRAMMARS
            for batch, turns in ((1, 2 * runs), (64, runs))
        ]
    for row in rows:
        print(json.dumps(row))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
