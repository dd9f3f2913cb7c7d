"""The headline run: does a real model learn on this CPU, within a quarter of an hour and 8 GB?

Runs `recipes/quickstart.toml` (or reads a finished run of it with --run) and holds the result
against its floors: the base model, the warmed model, the clock and the memory.

    python benchmarks/quickstart.py [--run RUN] [--quick] [--json FILE]
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

RECIPE = Path(__file__).parent.parent / "recipes" / "quickstart.toml"
# A smoke test of this script, not a measurement: nothing can be learned in it.
QUICK = (
    "run.steps=1",
    "warmup.examples_per_domain=0",
    "evaluate.tasks_per_domain=2",
    "rollout.groups_per_step=2",
    "quality.num_tasks=4",
    "quality.num_split_items=10",
)


def run(quick: bool, folder: Path) -> dict:
    command = [sys.executable, "-m", "burnish.cli.main", "run", str(RECIPE), "--json"]
    command += ["--set", f"run.directory={folder if quick else 'runs'}"]
    for setting in QUICK if quick else ():
        command += ["--set", setting]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"burnish failed: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def row(name, value, unit, target, ok, note, peer="floor", peer_value=None):
    ratio = value / peer_value if peer_value else None
    return {
        "name": name,
        "value": value,
        "unit": unit,
        "peer": peer,
        "peer_value": peer_value,
        "ratio": ratio,
        "target": target,
        "ok": ok,
        "n": 1,
        "note": note,
    }


def rows(result: dict) -> list[dict]:
    domains = result["domains"]
    gains = [d for d, r in domains.items() if r["ci_low"] > 0]
    losses = [d for d, r in domains.items() if r["ci_high"] < 0]
    learned = [d for d, r in domains.items() if r["rl_ci_low"] > 0]
    worse = [d for d, r in domains.items() if r["rl_ci_high"] < 0]
    mean = 100 * sum(r["diff"] for r in domains.values()) / len(domains)
    wall, memory = result["wall_s"], result["peak_rss_bytes"]
    return [
        row("quickstart_wall", wall, "s", 900, wall <= 900, "after install", "limit", 900),
        row("quickstart_memory", memory, "bytes", 8e9, memory <= 8e9, "peak", "limit", 8e9),
        row("domains_gained", len(gains), "domains", 4, len(gains) >= 4, ", ".join(gains)),
        row("mean_gain", mean, "points", 10, mean >= 10, "held out, against the base model"),
        row(
            "domains_gained_by_rl",
            len(learned),
            "domains",
            2,
            len(learned) >= 2,
            f"against the warmed model: {', '.join(learned)}",
        ),
        row(
            "domains_lost",
            len(losses) + len(worse),
            "domains",
            0,
            not losses and not worse,
            "interval below 0, against base or warmed model",
        ),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="try the script, measure nothing")
    parser.add_argument("--json", type=Path, help="write the rows here")
    parser.add_argument("--run", type=Path, help="a finished run to read instead of a new one")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if arguments.run:
            result = json.loads((arguments.run / "result.json").read_text())
        else:
            result = run(arguments.quick, Path(folder))
    found = rows(result)
    for entry in found:
        verdict = "ok" if entry["ok"] else "MISSED"
        print(
            f"{entry['name']:<22} {entry['value']:>16,.1f} {entry['unit']:<8} "
            f"target {entry['target']:>14,.0f}  {verdict:<6} {entry['note']}"
        )
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
