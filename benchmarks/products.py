"""The engine's products against oneDNN's with packed weights: the shapes of SmolLM2-135M, bf16.

    python benchmarks/products.py [--quick] [--threads N] [--json FILE]

Both alternate within one run, and medians count. A product of gate and up includes silu(gate) * up
here and not in its peer.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from burnish.model.kernels.matrix import PackedMatrix
from burnish.rollout.engine.linear import PackedLinear

HIDDEN, MLP, QKV, VOCABULARY = 576, 1536, 960, 49152
SHAPES = (
    ("qkv", HIDDEN, QKV),
    ("output", HIDDEN, HIDDEN),
    ("gate and up", HIDDEN, 2 * MLP),
    ("down", MLP, HIDDEN),
    ("head", HIDDEN, VOCABULARY),
)
MOST_HEAD_ROWS = 256


def medians(runs: tuple[Callable[[], object], ...], seconds: float) -> list[float]:
    """Of each, in seconds, one after the other again and again."""
    for run in runs:
        run()
    times: list[list[float]] = [[] for _ in runs]
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times[0]) < 3:
        for run, taken in zip(runs, times, strict=True):
            start = time.perf_counter()
            run()
            taken.append(time.perf_counter() - start)
    return [statistics.median(taken) for taken in times]


def measure(name: str, inputs: int, outputs: int, rows: int, seconds: float) -> dict[str, Any]:
    weight, x = torch.randn(outputs, inputs), torch.randn(rows, inputs).to(torch.bfloat16)
    gated = name == "gate and up"
    ours = PackedMatrix(weight, gated=gated)
    logits = torch.empty(rows, outputs) if name == "head" else None
    peer = PackedLinear(weight.to(torch.bfloat16), None)
    if logits is not None:
        mine: Callable[[], object] = lambda: ours.linear_fp32(x, logits)  # noqa: E731
    else:
        mine = (lambda: ours.gated(x)) if gated else (lambda: ours.linear(x))
    own_s, peer_s = medians((mine, lambda: peer(x)), seconds)
    work = 2e-9 * rows * inputs * outputs
    return {
        "name": f"product {name}, {rows} rows", "value": work / own_s, "unit": "GFLOP/s",
        "peer": "oneDNN, packed" if peer.is_packed else "torch", "peer_value": work / peer_s,
        "ratio": peer_s / own_s, "target": None, "ok": None, "n": 1, "note": "",
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    rows = []
    with torch.inference_mode():
        for count in (256,) if options.quick else (64, 256, 2048):
            for name, inputs, outputs in SHAPES:
                if name == "head" and count > MOST_HEAD_ROWS:
                    continue  # prompts need the head for their last token only
                row = measure(name, inputs, outputs, count, 0.3 if options.quick else 1.5)
                print(f"{row['name']:32} {row['value']:6.0f} {row['unit']}  "
                      f"{row['peer']} {row['peer_value']:6.0f}  x{row['ratio']:.2f}")  # fmt: skip
                rows.append(row)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
