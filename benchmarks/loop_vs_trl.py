"""Rollouts trained per minute of the whole loop, against TRL's GRPOTrainer on the same CPU.

Same model, prompts, group size, batch and token limit. The unit is a rollout that was sampled,
scored and trained on; the first step of each is left out, and the median step counts. TRL runs in
bf16 and in fp32, and the faster one counts. It lives in an environment of its own:

    python -m venv trl && trl/bin/pip install "torch>=2.9,<2.14" trl==1.16.0
    python benchmarks/loop_vs_trl.py --peer-python trl/bin/python [--quick] [--json FILE]
"""

import argparse
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from burnish.model.loading import export, load_model
from burnish.store.reader import RunReader
from burnish.telemetry.events import EventKind

HERE = Path(__file__).parent / "loop"
MODEL = "smollm2-135m-instruct"
GROUP_SIZE, GROUPS_PER_STEP, MAX_TOKENS = 8, 8, 32
TARGET = 3.0
RECIPE = """
[run]
name = "bench"
directory = "{directory}"
steps = {steps}
checkpoint_every_steps = 1000
train_threads = {threads}
[domains.letters]
environment = "letters:Letters"
[rollout]
group_size = {group_size}
groups_per_step = {groups}
[engine]
num_threads = {threads}
num_pages = 2048
[quality]
num_tasks = 4
num_split_items = 10
[evaluate]
tasks_per_domain = 0
"""


def ours(folder: Path, steps: int, threads: int) -> float:
    """Trained rollouts per minute."""
    recipe = folder / "bench.toml"
    recipe.write_text(
        RECIPE.format(
            directory=folder,
            steps=steps,
            threads=threads,
            group_size=GROUP_SIZE,
            groups=GROUPS_PER_STEP,
        )
    )
    command = [sys.executable, "-m", "burnish.cli.main", "run", str(recipe), "--json"]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"burnish failed: {done.stderr[-2000:]}")
    result = json.loads(done.stdout.splitlines()[-1])
    events = list(RunReader(Path(result["run_dir"])).events())
    ends = [e for e in events if e.kind is EventKind.STEP_FINISHED and "groups" in e.data]
    rates = [
        60 * GROUP_SIZE * len(after.data["groups"]) / (after.t - before.t)
        for before, after in itertools.pairwise(ends)
    ]
    return statistics.median(rates)


def peer(python: str, model: Path, folder: Path, steps: int, threads: int) -> tuple[float, str]:
    """TRL's trained rollouts per minute in its faster precision, and what ran."""
    best, what = 0.0, ""
    for dtype in ("bfloat16", "float32"):
        settings = {
            "threads": threads,
            "group_size": GROUP_SIZE,
            "groups_per_step": GROUPS_PER_STEP,
            "micro_batch": GROUP_SIZE * 2,
            "max_tokens": MAX_TOKENS,
            "steps": steps,
            "dtype": dtype,
            "bf16": dtype == "bfloat16",
        }
        output = folder / f"{dtype}.json"
        script = [python, str(HERE / "trl_peer.py"), str(model), json.dumps(settings), str(output)]
        done = subprocess.run(
            script, env=environment(), capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise SystemExit(f"TRL failed: {done.stderr[-2000:]}")
        found = json.loads(output.read_text())
        rate = 60 * GROUP_SIZE * GROUPS_PER_STEP / statistics.median(found["seconds"][1:])
        if rate > best:
            best, what = rate, f"TRL {found['version']}, {dtype}"
    return best, what


def environment() -> dict[str, str]:
    """Where both find the task."""
    return os.environ | {"PYTHONPATH": str(HERE), "HF_HUB_OFFLINE": "1"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two counted steps instead of five")
    parser.add_argument("--json", type=Path, help="write the rows here")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--peer-python", default=os.environ.get("BURNISH_TRL_PYTHON"))
    arguments = parser.parse_args()
    steps = 3 if arguments.quick else 6
    row = {
        "name": "rollouts_trained_per_minute",
        "value": None,
        "unit": "rollouts/min",
        "peer": "TRL GRPOTrainer",
        "peer_value": None,
        "ratio": None,
        "target": TARGET,
        "ok": None,
        "n": steps - 1,
        "note": "no peer: give --peer-python an environment with TRL",
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        row["value"] = ours(folder, steps, arguments.threads)
        if arguments.peer_python and shutil.which(arguments.peer_python):
            loaded = load_model(MODEL)
            export(loaded.decoder, loaded, folder / "model")
            rate, what = peer(
                arguments.peer_python, folder / "model", folder, steps, arguments.threads
            )
            row |= {"peer": what, "peer_value": rate, "ratio": row["value"] / rate}
            row |= {"ok": row["ratio"] >= TARGET, "note": f"{arguments.threads} threads, medians"}
    print(json.dumps(row, indent=2))
    if arguments.json:
        arguments.json.write_text(json.dumps([row], indent=2) + "\n")


if __name__ == "__main__":
    main()
