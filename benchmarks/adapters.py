"""LoRA in one batch: 64 requests over 8 adapters against the same requests without any.

    python benchmarks/adapters.py [--quick] [--threads N] [--cpu] [--json FILE]

One engine, in exact mode so that its own kernels run. Runs alternate; ratios are medians of those
of neighbouring runs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from burnish.core.records import GenerateRequest, SamplingParams
from burnish.model.config import ModelConfig
from burnish.model.loading import load_model
from burnish.model.lora import Lora, lora_from, projections
from burnish.rollout.engine.engine import EngineCore
from burnish.rollout.engine.limits import CoreLimits

MODEL = "smollm2-135m-instruct"
Clock = Callable[[], float]
BATCH, ADAPTERS, PROMPT = 64, 8, 8


def random_lora(config: ModelConfig, seed: int, rank: int) -> Lora:
    """An adapter of every projection, small enough to leave the numbers alone."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, place in projections(config).items():
        for half, shape in (("A", (rank, place.inputs)), ("B", (place.outputs, rank))):
            value = 1e-3 * torch.randn(shape, generator=generator)
            tensors[f"base_model.model.{name}.lora_{half}.weight"] = value
    return lora_from(tensors, {"peft_type": "LORA", "r": rank, "lora_alpha": rank}, config)


def rate(core: EngineCore, names: list[str | None], new: int, clock: Clock) -> float:
    """Tokens per second of a batch after its prompts are read; request i goes by `names[i]`."""
    core.forget_prefixes()
    sequences = []
    for i, name in enumerate(names):
        prompt = tuple(1000 + (7919 * i + j) % 30_000 for j in range(PROMPT))
        params = SamplingParams(max_tokens=new, temperature=0.0)
        request = GenerateRequest(request_id=f"{i}", prompt_ids=prompt, params=params, adapter=name)
        sequences.append(core.add(request))
    while not all(sequence.num_sampled for sequence in sequences):
        core.step()
    first, start = core.counters.sampled_tokens, clock()
    while core.has_work:
        core.step()
    return (core.counters.sampled_tokens - first) / (clock() - start)


def measure(rank: int, rounds: int, new: int, clock: Clock) -> list[dict[str, Any]]:
    """One row for each way of mixing."""
    loaded = load_model(MODEL)
    limits = CoreLimits(num_pages=1024, max_running=BATCH, budget_tokens=4096, exact=True)
    core = EngineCore(loaded.config, loaded.decoder.state_dict(), limits=limits)
    for number in range(ADAPTERS):
        lora = random_lora(loaded.config, number, rank)
        core.adapters.add(f"{number}", core.adapt(lora), 0)
    mixes: dict[str, list[str | None]] = {
        "none": [None] * BATCH,
        "1 adapter": ["0"] * BATCH,
        f"{ADAPTERS} adapters": [f"{i % ADAPTERS}" for i in range(BATCH)],
        "half of the requests, 8 adapters": [
            f"{i % ADAPTERS}" if i < BATCH // 2 else None for i in range(BATCH)
        ],
    }
    rates: dict[str, list[float]] = {name: [] for name in mixes}
    rate(core, mixes[f"{ADAPTERS} adapters"], 2, clock)
    for turn in range(rounds):
        names = list(mixes)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            rates[name].append(rate(core, mixes[name], new, clock))
    base = rates["none"]
    return [
        {
            "name": f"adapters: batch {BATCH}, {name}, rank {rank}",
            "value": round(statistics.median(found), 1),
            "unit": "tokens/s",
            "peer": "no adapter",
            "peer_value": round(statistics.median(base), 1),
            "ratio": round(statistics.median(a / b for a, b in zip(found, base, strict=True)), 3),
            "target": None,
            "ok": None,
            "n": rounds,
            "note": f"adapters of all projections, {new} tokens each",
        }
        for name, found in rates.items()
        if name != "none"
    ]


def main() -> int:
    """Measure and write rows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cpu", action="store_true", help="CPU seconds of one thread, not wall")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1 if options.cpu else options.threads)
    clock = time.thread_time if options.cpu else time.perf_counter
    rows = measure(8, 2 if options.quick else 4, 8 if options.quick else 24, clock)
    rows += [] if options.quick else measure(32, 4, 24, clock)
    for row in rows:
        sys.stdout.write(json.dumps(row) + "\n")
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
