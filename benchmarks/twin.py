"""Does the simulated pipeline say what a real one does? Real small runs beside their twin.

    python benchmarks/twin.py [--quick] [--json FILE]

A random two-layer model trains on eight toy domains whose answers have fixed lengths and whose
verdicts take up to seconds, under eight policies of admission: three lags, and loads of one, two or
four groups at a time. A twin is fitted to the records of a run and then runs the same ledger, load
control, batcher and order of service. Every run is replayed by its own twin: target, within 10 %.
One twin, of the runs under one policy, predicts all policies: target, a rank correlation of at
least 0.8.

Other work on the machine must not decide. Rounds of all policies follow each other, every second
one in reverse, so that a drift meets all alike. Rates count relative to the mean of their round,
and a policy's figure is the median over rounds. The twin is fitted to runs from all rounds too.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch

from burnish.model.config import ModelConfig
from burnish.model.decoder import Decoder
from burnish.model.hf_directory import save
from burnish.model.loading import load_model
from burnish.plan.pipeline.fitted import Twin, fit_twin, step_figures
from burnish.plan.pipeline.flow_system import Flow
from burnish.plan.pipeline.simulator import Simulator
from burnish.schedule.flow.load import LoadConfig
from burnish.store.reader import RunReader

TOYS = Path(__file__).parent / "toy"
SLOTS, GROUP, BATCH, WARMUP = 16, 4, 6, 3


class Policy(NamedTuple):
    name: str
    max_lag: int
    load: float


FITTED = Policy("lag 1", 1, 1.0)
QUICK = (
    Policy("barrier", 0, 1.0),
    FITTED,
    Policy("lag 3", 3, 1.0),
    Policy("lag 3, half load", 3, 0.5),
    Policy("lag 1, quarter load", 1, 0.25),
)
POLICIES = (
    *QUICK,
    Policy("barrier, quarter load", 0, 0.25),
    Policy("lag 1, half load", 1, 0.5),
    Policy("barrier, half load", 0, 0.5),
)

CONFIG = """
[run]
name = "twin"
steps = {steps}
checkpoint_every_steps = 1000
train_threads = 1
directory = "{runs}"
[model]
source = "{model}"
{domains}
[rollout]
group_size = {group}
groups_per_step = {batch}
max_lag = {lag}
[flow.load]
target_ratio = {load}
max_ratio = {load}
min_ratio = {load}
[engine]
num_threads = 1
num_pages = 1024
max_running = {slots}
[schedule]
policy = "uniform"
[quality]
num_tasks = 4
num_split_items = 10
[evaluate]
tasks_per_domain = 0
"""


def tiny_model(directory: Path) -> None:
    loaded = load_model("smollm2-135m-instruct")
    torch.manual_seed(0)
    config = ModelConfig(
        family="llama", vocab_size=loaded.config.vocab_size, hidden_size=32,
        intermediate_size=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8,
        max_position_embeddings=512, rms_norm_eps=1e-5, rope_theta=10000.0,
        tie_word_embeddings=True,
    )  # fmt: skip
    decoder = Decoder(config)
    with torch.no_grad():
        for parameter in decoder.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.05)
    save(decoder, loaded.tokenizer, loaded.renderer, directory, dtype="float32")


def real_run(policy: Policy, model: Path, folder: Path, steps: int) -> RunReader:
    domains = "\n".join(
        f'[domains.timed{i}]\nenvironment = "twin_domains:Timed{i}"' for i in range(8)
    )
    folder.mkdir()
    config = folder / "run.toml"
    config.write_text(
        CONFIG.format(steps=steps, runs=folder / "runs", model=model, domains=domains, group=GROUP,
                      batch=BATCH, lag=policy.max_lag, load=policy.load, slots=SLOTS)
    )  # fmt: skip
    path = os.pathsep.join(filter(None, [str(TOYS), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-m", "burnish.cli.main", "run", str(config), "--json"],
        env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        sys.exit(done.stderr[-2000:])
    return RunReader(Path(json.loads(done.stdout.splitlines()[-1])["run_dir"]))


def real_rate(reader: RunReader) -> float:
    """Trained groups per minute after the warm-up."""
    walls = [f.step_s for f in step_figures(reader.metrics(), WARMUP + 1)]
    return 60.0 * BATCH * len(walls) / sum(walls)


def twin_of(*readers: RunReader) -> Twin:
    return fit_twin(readers, num_slots=SLOTS, first_step=WARMUP + 1)


def twin_rate(twin: Twin, policy: Policy, steps: int) -> float:
    """The same in the twin: the mean of five draws."""
    load = LoadConfig(target_ratio=policy.load, max_ratio=policy.load, min_ratio=policy.load)
    rates = []
    for seed in range(5):
        system = Flow(BATCH, policy.max_lag, load=load)
        sim = Simulator(twin.workload, twin.cluster, system, seed=seed, group_size=GROUP)
        rates.append(60.0 * BATCH / sim.run(steps - WARMUP, WARMUP).step_s)
    return statistics.fmean(rates)


def relative(rates: dict[str, list[float]]) -> list[float]:
    """Of each policy: the median over rounds of its rate over the round's geometric mean."""
    rounds = list(zip(*rates.values(), strict=True))
    means = [statistics.geometric_mean(found) for found in rounds]
    return [
        statistics.median(rate / mean for rate, mean in zip(found, means, strict=True))
        for found in rates.values()
    ]


def spearman(a: list[float], b: list[float]) -> float:
    def ranks(values: list[float]) -> list[int]:
        return [sorted(values).index(v) for v in values]

    n = len(a)
    squares = sum((x - y) ** 2 for x, y in zip(ranks(a), ranks(b), strict=True))
    return 1.0 - 6.0 * squares / (n * (n * n - 1))


def row(name: str, value: float, unit: str, peer: str, peer_value: float | None,
        ratio: float | None, target: float | None, ok: bool | None, n: int,
        note: str = "") -> dict[str, Any]:  # fmt: skip
    return {"name": name, "value": value, "unit": unit, "peer": peer, "peer_value": peer_value,
            "ratio": ratio, "target": target, "ok": ok, "n": n, "note": note}  # fmt: skip


def rows_of(
    policies: tuple[Policy, ...], runs: dict[str, list[RunReader]], steps: int
) -> list[dict[str, Any]]:
    repeats = len(runs[FITTED.name])
    twin = twin_of(*runs[FITTED.name])
    real = {p.name: [real_rate(r) for r in runs[p.name]] for p in policies}
    figures, twins = relative(real), [twin_rate(twin, p, steps) for p in policies]
    noise = max(max(v) / min(v) - 1.0 for v in real.values())
    again = spearman([v[0] for v in real.values()], [v[-1] for v in real.values()])
    replays = {p.name: [twin_rate(twin_of(r), p, steps) / real_rate(r) for r in runs[p.name]]
               for p in policies}  # fmt: skip
    ratios = [ratio for found in replays.values() for ratio in found]
    off = statistics.median(abs(ratio - 1.0) for ratio in ratios)
    engine = twin.cluster.engine
    rows = [
        row("replay of runs by their own twins: median error", off, "ratio", "", None, None, 0.1,
            off <= 0.1, len(ratios), f"worst {max(abs(r - 1.0) for r in ratios):.2f}; "
            f"engine {engine.speed:.0f} tok/s alone, half at {engine.half:.0f}; trainer "
            f"{twin.cluster.train_tokens_per_s:.0f} tok/s, publish {twin.cluster.publish_s:.2f} s"),
        row("rank correlation over policies", spearman(figures, twins), "rho", "real runs", None,
            None, 0.8, spearman(figures, twins) >= 0.8, len(policies),
            f"first against last round of the real runs {again:.2f}; slowest to fastest policy "
            f"{max(figures) / min(figures):.1f} times"),
        row("noise: fastest over slowest repeat, worst policy", 1.0 + noise, "ratio", "", None,
            None, None, None, repeats),
    ]  # fmt: skip
    for policy, value in zip(policies, twins, strict=True):
        median = statistics.median(real[policy.name])
        rows.append(
            row(f"{policy.name}: the fitted twin over real", value, "groups/min",
                "real, median", median, value / median, None, None, repeats,
                "real " + " ".join(f"{v:.0f}" for v in real[policy.name])
                + ", own twins over real " + " ".join(f"{v:.2f}" for v in replays[policy.name]))
        )  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    steps, rounds, policies = (12, 1, QUICK) if options.quick else (20, 3, POLICIES)
    runs: dict[str, list[RunReader]] = {policy.name: [] for policy in policies}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tiny_model(folder / "model")
        for number in range(rounds):
            for policy in policies if number % 2 == 0 else policies[::-1]:
                place = folder / f"{policy.name}-{number}".replace(" ", "-").replace(",", "")
                runs[policy.name].append(real_run(policy, folder / "model", place, steps))
        rows = rows_of(policies, runs, steps)
    for r in rows:
        mark = {True: "ok  ", False: "MISS", None: "    "}[r["ok"]]
        value = r["value"] if r["ratio"] is None else r["ratio"]
        print(f"{mark} {r['name']}: {value:.3f}  [{r['value']:.1f} {r['unit']}]  {r['note']}")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
