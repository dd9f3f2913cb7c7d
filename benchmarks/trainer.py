"""Training tokens per second of SmolLM2-135M against a plain transformers training step.

Both train the same batch: groups of 8 samples that share a prompt of 96 tokens, with completions of
24 to 48. Tokens are counted alike, every token of every sequence. A measurement is forward and
backward; the optimizer is reported apart. The peer runs padded micro-batches of one group, once
under bf16 autocast with fp32 weights and once in pure bf16; the faster one counts.

    python benchmarks/trainer.py [--quick] [--threads N] [--json FILE]
"""

import argparse
import json
import random
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from burnish.core.clock import SystemClock
from burnish.core.records import TrainSequence
from burnish.model.loading import LoadedModel, export, load_model
from burnish.train.config import TrainConfig
from burnish.train.trainer import Trainer

PROMPT_TOKENS = 96
COMPLETION_TOKENS = (24, 48)
SAMPLES = 8
TARGET_RATIO = 1.5
MODEL = "smollm2-135m-instruct"


def batch(num_groups: int, vocab_size: int) -> list[TrainSequence]:
    """Random tokens: speed does not depend on what they say."""
    rng = random.Random(0)
    sequences = []
    for group in range(num_groups):
        prompt = [rng.randrange(vocab_size) for _ in range(PROMPT_TOKENS)]
        for _ in range(SAMPLES):
            n = rng.randint(*COMPLETION_TOKENS)
            sequences.append(
                TrainSequence(
                    token_ids=(*prompt, *(rng.randrange(vocab_size) for _ in range(n))),
                    loss_mask=(False,) * PROMPT_TOKENS + (True,) * n,
                    logprobs=(0.0,) * PROMPT_TOKENS + (-11.0,) * n,
                    advantages=(0.0,) * PROMPT_TOKENS + (rng.gauss(0, 1),) * n,
                    prefix_group=str(group),
                    num_prefix_tokens=PROMPT_TOKENS,
                    domain="random",
                )
            )
    return sequences


class Peer:
    """AutoModelForCausalLM with its own loss, padded micro-batches, gradients accumulated."""

    def __init__(self, directory: Path, *, autocast: bool) -> None:
        from transformers import AutoModelForCausalLM

        dtype = torch.float32 if autocast else torch.bfloat16
        self.autocast = autocast
        self.model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
        self.model.train()
        self.model.config.use_cache = False

    def forward_backward(self, sequences: list[TrainSequence]) -> None:
        total = sum(sum(s.loss_mask) for s in sequences)
        for start in range(0, len(sequences), SAMPLES):
            part = sequences[start : start + SAMPLES]
            longest = max(len(s.token_ids) for s in part)
            ids = torch.zeros(len(part), longest, dtype=torch.long)
            seen = torch.zeros_like(ids)
            labels = torch.full_like(ids, -100)
            for i, s in enumerate(part):
                n = len(s.token_ids)
                ids[i, :n], seen[i, :n] = torch.tensor(s.token_ids), 1
                labels[i, PROMPT_TOKENS:n] = ids[i, PROMPT_TOKENS:n]
            with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
                out = self.model(input_ids=ids, attention_mask=seen, labels=labels)
            (out.loss * (labels.ne(-100).sum() / total)).backward()
        self.model.zero_grad(set_to_none=True)


class BothClocks(SystemClock):
    """Remembers wall and CPU time of every question the trainer asks its clock."""

    def __init__(self) -> None:
        self.seen: list[tuple[float, float]] = []

    def now_s(self) -> float:
        self.seen.append((time.perf_counter(), time.process_time()))
        return self.seen[-1][0]

    def between(self, first: int, second: int) -> tuple[float, float]:
        """Wall and CPU seconds between two of them."""
        (wall, cpu), (later_wall, later_cpu) = self.seen[first], self.seen[second]
        return later_wall - wall, later_cpu - cpu


def clocked(run: Callable[[], None]) -> tuple[float, float]:
    """Wall and CPU seconds."""
    clock = BothClocks()
    clock.now_s()
    run()
    clock.now_s()
    return clock.between(0, 1)


def measure(quick: bool) -> list[dict[str, object]]:
    loaded = load_model(MODEL)
    with tempfile.TemporaryDirectory() as scratch:
        export(loaded.decoder, loaded, Path(scratch) / "model", dtype="float32")
        return compare(loaded, Path(scratch) / "model", quick)


def compare(loaded: LoadedModel, directory: Path, quick: bool) -> list[dict[str, object]]:
    sequences = batch(2 if quick else 8, loaded.config.vocab_size)
    num_tokens = sum(len(s.token_ids) for s in sequences)
    clock = BothClocks()
    trainer = Trainer(TrainConfig(), loaded.decoder, clock=clock)
    optimizer_s: list[float] = []

    def ours() -> tuple[float, float]:
        """A step asks the clock at its start, before the optimizer and at its end."""
        optimizer_s.append(trainer.step(sequences).optimizer_s)
        return clock.between(-3, -2)

    ours()
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    peers = {
        "autocast": Peer(directory, autocast=True),
        "pure bf16": Peer(directory, autocast=False),
    }
    for peer in peers.values():
        peer.forward_backward(sequences[:SAMPLES])
    runs: dict[str, list[tuple[float, float]]] = {name: [] for name in ("ours", *peers)}
    for _ in range(1 if quick else 3):
        runs["ours"].append(ours())
        for name, peer in peers.items():
            runs[name].append(clocked(partial(peer.forward_backward, sequences)))
    rows = [
        throughput(f"forward+backward per {clock} second", runs, i, num_tokens)
        for i, clock in enumerate(("wall", "CPU"))
    ]
    count = len(runs["ours"])
    rows.append(plain("optimizer step", statistics.median(optimizer_s), "s", count))
    rows.append(plain("peak memory of the trainer", peak_bytes / 2**30, "GiB", 1))
    return rows


def throughput(
    name: str, runs: dict[str, list[tuple[float, float]]], clock: int, num_tokens: int
) -> dict[str, object]:
    rate = {who: num_tokens / statistics.median(t[clock] for t in ts) for who, ts in runs.items()}
    peer = max((who for who in rate if who != "ours"), key=rate.__getitem__)
    ratio = rate["ours"] / rate[peer]
    others = ", ".join(f"{who} {value:.0f}" for who, value in rate.items() if who != "ours")
    return {
        "name": f"trainer: {name}",
        "value": rate["ours"],
        "unit": "tokens/s",
        "peer": f"transformers, {peer}",
        "peer_value": rate[peer],
        "ratio": ratio,
        "target": TARGET_RATIO,
        "ok": ratio >= TARGET_RATIO,
        "n": len(runs["ours"]),
        "note": f"{torch.get_num_threads()} threads; peers: {others}",
    }


def plain(name: str, value: float, unit: str, n: int) -> dict[str, object]:
    row: dict[str, object] = dict.fromkeys(("peer", "peer_value", "ratio", "target", "ok"))
    return {"name": f"trainer: {name}", "value": value, "unit": unit, **row, "n": n, "note": ""}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="2 groups, one run each")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    rows = measure(arguments.quick)
    for row in rows:
        versus = "" if row["ratio"] is None else f" = {row['ratio']:.2f} x {row['peer']}"
        print(f"{row['name']}: {row['value']:.2f} {row['unit']}{versus} {row['note']}")
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2))
    return 0 if all(row["ok"] is not False for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
