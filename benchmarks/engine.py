"""Tokens per second of the engine beside `transformers.generate`: same weights, prompts, lengths.

    python benchmarks/engine.py [--quick] [--threads N] [--json FILE]

Prompts of 100 tokens, 32 new ones each (8 with --quick), sampled at temperature 1 in bf16. Each
row is the median of interleaved runs and includes the prompts. `decode` rows take the run with one
new token off both sides. `group` rows sample 8 continuations of each prompt.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from burnish.core.records import GenerateRequest, SamplingParams
from burnish.model.loading import export, load_model
from burnish.rollout.engine.engine import EngineCore
from burnish.rollout.engine.limits import CoreLimits

MODEL = "smollm2-135m-instruct"
PROMPT_TOKENS = 100
# (name, prompts, samples of each prompt, least ratio to be called good)
CASES = (("b1", 1, 1, 1.2), ("b16", 16, 1, 1.3), ("b64", 64, 1, 1.3), ("group8x8", 8, 8, 2.0))
DECODE_TARGETS = {"b1": 1.3, "b16": 1.8, "b64": 2.0, "group8x8": 2.0}


def prompts(number: int, seed: int) -> list[tuple[int, ...]]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1000, 40_000, (number, PROMPT_TOKENS), generator=generator)
    return [tuple(row) for row in ids.tolist()]


def run_engine(core: EngineCore, number: int, samples: int, new: int, seed: int) -> float:
    core.forget_prefixes()
    for i, prompt in enumerate(prompts(number, seed)):
        for k in range(samples):
            params = SamplingParams(max_tokens=new, seed=1000 * i + k)
            core.add(
                GenerateRequest(request_id=f"{seed}/{i}/{k}", prompt_ids=prompt, params=params)
            )
    start = time.perf_counter()
    while core.has_work:
        core.step()
    return time.perf_counter() - start


def run_transformers(model: Any, number: int, samples: int, new: int, seed: int) -> float:
    ids = torch.tensor(prompts(number, seed))
    start = time.perf_counter()
    with torch.inference_mode():
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            top_k=0,
            num_return_sequences=samples,
            min_new_tokens=new,
            max_new_tokens=new,
            pad_token_id=0,
        )
    return time.perf_counter() - start


def row(
    name: str, tokens: int, ours: list[float], theirs: list[float] | None, target: float
) -> Any:
    value = tokens / statistics.median(ours)
    peer = tokens / statistics.median(theirs) if theirs else None
    ratio = value / peer if peer else None
    return {
        "name": f"engine: {name}",
        "value": round(value, 1),
        "unit": "token/s",
        "peer": "transformers.generate bf16",
        "peer_value": round(peer, 1) if peer else None,
        "ratio": round(ratio, 2) if ratio else None,
        "target": target,
        "ok": ratio >= target if ratio else None,
        "n": len(ours),
        "note": "" if ratio else "transformers is not installed",
    }


def load_peer(loaded: Any) -> Any:
    try:
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging
    except ImportError:
        return None
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as directory:
        export(loaded.decoder, loaded, Path(directory) / "model")
        model = AutoModelForCausalLM.from_pretrained(
            Path(directory) / "model", dtype=torch.bfloat16
        )
        return model.eval()


def measure(core: EngineCore, peer: Any, *, quick: bool) -> list[Any]:
    new, repeats = (8, 2) if quick else (32, 3)
    rows = []
    for name, number, samples, target in CASES:
        if quick and name == "b64":
            continue
        number = min(number, 2 if samples > 1 else 8) if quick else number
        times: dict[str, list[float]] = {}

        def timed(key: str, call: Callable[[], float], times: dict[str, list[float]]) -> None:
            times.setdefault(key, []).append(call())

        for seed in range(repeats):
            for count in (1, new):
                args = (number, samples, count, seed)
                timed(f"ours{count}", lambda args=args: run_engine(core, *args), times)
                if peer is not None:
                    timed(f"peer{count}", lambda args=args: run_transformers(peer, *args), times)
        rows.append(
            row(name, number * samples * new, times[f"ours{new}"], times.get(f"peer{new}"), target)
        )
        ours = [b - a for a, b in zip(times["ours1"], times[f"ours{new}"], strict=True)]
        theirs = None
        if peer is not None:
            theirs = [b - a for a, b in zip(times["peer1"], times[f"peer{new}"], strict=True)]
        tokens = number * samples * (new - 1)
        rows.append(row(f"{name}_decode", tokens, ours, theirs, DECODE_TARGETS[name]))
        for r in rows[-2:]:
            print(f"{r['name']:18} {r['value']:8} token/s  peer {r['peer_value']}  x{r['ratio']}")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="under a minute, fewer sizes")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path, help="write the rows here")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    loaded = load_model(MODEL)
    core = EngineCore(
        loaded.config, loaded.decoder.state_dict(), limits=CoreLimits(budget_tokens=2048)
    )
    peer = load_peer(loaded)
    run_engine(core, 2, 1, 4, 99)
    if peer is not None:
        run_transformers(peer, 2, 1, 4, 99)
    rows = measure(core, peer, quick=options.quick)
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
