"""What the engine's bookkeeping costs, without a model: planning, prefix reuse, memory of groups.

    python benchmarks/engine_scheduler.py [--quick] [--json FILE]

`plan` is one step's decisions with 256 requests running and 5,000 queued, medians over steps in
which requests end and others start; its peer is the step time of a small model on one core that it
must vanish beside. `match` compares the time per token of finding a known prefix of 32,768 tokens
with that of one of 1,024: it must not grow. `group` is the pages of 16 samples of one prompt of
2,000 tokens beside those of 16 prompts.
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

from burnish.core.records import GenerateRequest, SamplingParams
from burnish.rollout.engine.limits import CoreLimits
from burnish.rollout.engine.pages import PagePool
from burnish.rollout.engine.radix import RootKey
from burnish.rollout.engine.residency import Residency
from burnish.rollout.engine.scheduler import Scheduler
from burnish.rollout.engine.sequence import Sequence, Token

PLAN_TARGET_MS = 2.0


class NoTensors:
    """A cache without keys and values."""

    num_bytes_per_page = 1 << 18

    def copy_page(self, source: int, target: int) -> None:
        pass

    def save_pages(self, pages: Any) -> Any:
        return None

    def load_pages(self, saved: Any, pages: Any) -> None:
        pass

    def clear_pages(self, pages: Any) -> None:
        pass


def scheduler(limits: CoreLimits) -> Scheduler:
    return Scheduler(Residency(NoTensors(), limits, version=0, flops_per_token=2.7e8), limits)


def request(number: int, prompt: tuple[int, ...], max_tokens: int) -> Sequence:
    asked = GenerateRequest(
        request_id=str(number),
        prompt_ids=prompt,
        params=SamplingParams(max_tokens=max_tokens),
        priority=number % 3,
        session_id=f"s{number % 700}",
    )
    return Sequence(asked, len(prompt) + max_tokens, number)


def step(core: Scheduler) -> float:
    """One step with a token for every sequence that is ready; seconds of all bookkeeping."""
    start = time.perf_counter()
    work = core.next_work()
    core.computed(work)
    for sequence, *_ in work:
        if sequence.num_pending == 0 and sequence.append(Token(7, -1.0), 0) is not None:
            core.end(sequence)
    return time.perf_counter() - start


def plan_rows(steps: int) -> list[Any]:
    limits = CoreLimits(num_pages=8192, max_running=256, budget_tokens=2048)
    core = scheduler(limits)
    for i in range(5600):
        # Groups of eight, as in training.
        prompt = tuple(range(i // 8, i // 8 + 100))
        core.add(request(i, prompt, 24 + i % 41))
    while len(core.running) < limits.max_running:
        step(core)
    times = [step(core) for _ in range(steps)]
    assert len(core.running) > 200
    assert len(core.waiting) > 4000
    worst = sorted(times)[int(0.95 * len(times))] * 1e3
    return [
        row("plan, 256 running, 5,000 queued", statistics.median(times) * 1e3, "ms", steps,
            PLAN_TARGET_MS, f"95% of steps within {worst:.2f} ms"),
    ]  # fmt: skip


def match_seconds(length: int, repeats: int) -> float:
    pool = PagePool(length // 16 + 1, 16)
    tokens, node = list(range(length)), pool.root(RootKey(0))
    for start in range(0, length, 16):
        node = pool.index(node, pool.take(), tokens[start : start + 16])
    times = []
    for _ in range(repeats):
        start_s = time.perf_counter()
        pool.match(pool.root(RootKey(0)), tokens, length)
        times.append(time.perf_counter() - start_s)
    return statistics.median(times) / length


def match_row(repeats: int) -> Any:
    short, long = match_seconds(1024, repeats), match_seconds(32_768, repeats)
    return row("match, time per token at 32k over 1k", long / short, "ratio", repeats, 2.0,
               f"{long * 1e9:.0f} ns per token at 32k")  # fmt: skip


def most_pages(prompts: list[tuple[int, ...]]) -> int:
    limits = CoreLimits(num_pages=4096, budget_tokens=1 << 16)
    core, most = scheduler(limits), 0
    for i, prompt in enumerate(prompts):
        core.add(request(i, prompt, 32))
    while core.running or core.waiting:
        step(core)
        most = max(most, limits.num_pages - core.memory.pool.room)
    return most


def group_row() -> Any:
    prompt = tuple(range(2000))
    group = most_pages([prompt] * 16)
    apart = most_pages([(5000 + i, *prompt) for i in range(16)])
    return row("KV of a group of 16 over 16 prompts", group / apart, "ratio", 1, 1 / 8,
               f"{group} pages beside {apart}")  # fmt: skip


def row(name: str, value: float, unit: str, n: int, most: float, note: str) -> Any:
    return {
        "name": f"engine bookkeeping: {name}",
        "value": round(value, 4),
        "unit": unit,
        "peer": "bound",
        "peer_value": most,
        "ratio": round(value / most, 3),
        "target": 1.0,
        "ok": value <= most,
        "n": n,
        "note": note,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer repeats")
    parser.add_argument("--json", type=Path, help="write the rows here")
    options = parser.parse_args()
    repeats = 20 if options.quick else 200
    rows = [*plan_rows(repeats), match_row(repeats // 2), group_row()]
    for r in rows:
        print(f"{r['name']:60} {r['value']:8} {r['unit']:6} <= {r['target'] * r['peer_value']:g}"
              f"  {r['note']}")  # fmt: skip
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
