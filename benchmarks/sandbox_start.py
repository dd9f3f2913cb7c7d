"""How long a command in a box takes, against no box and against bare bubblewrap.

    python benchmarks/sandbox_start.py [--quick] [--json FILE]

They are measured in turn, so that whatever else the machine does meets all alike; figures are
medians. "Bare bubblewrap" has the same namespaces and mounts, but no filter, limits, control
groups, input, output or watching. A box that is used again and again has its next process started
ahead, while the caller thinks; "acquire, exec, destroy" shows the cost without that.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from burnish.core.boxes import ExecStatus, Limits, Sandbox
from burnish.core.errors import UserError
from burnish.sandbox.bubblewrap.inspection import find_bwrap
from burnish.sandbox.bubblewrap.pool import BubblewrapPool
from burnish.sandbox.config import SandboxConfig
from burnish.sandbox.host_view import system_paths
from burnish.sandbox.interpreter import find_python, python_argv

TARGET_RATIO_TO_BWRAP = 2.0
LIMITS = Limits(wall_s=120, cpu_s=120)


def spawn(argv: tuple[str, ...]) -> None:
    pid = os.posix_spawnp(argv[0], argv, {"PATH": "/usr/bin:/bin"})
    _, status = os.waitpid(pid, 0)
    assert status == 0


def bare_bwrap(bwrap: str) -> Callable[[tuple[str, ...]], None]:
    options = ["--unshare-all", "--unshare-user", "--die-with-parent", "--new-session"]
    for entry in system_paths():
        how = ["--symlink", entry.link] if entry.link else ["--ro-bind", entry.path]
        options += [*how, entry.path]
    options += ["--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp", "--tmpfs", "/work"]

    def run(argv: tuple[str, ...]) -> None:
        subprocess.run([bwrap, *options, "--", *argv], check=True, stdin=subprocess.DEVNULL)

    return run


async def timed(action: Callable[[], Awaitable[None] | None]) -> float:
    start = time.perf_counter()
    waiting = action()
    if waiting is not None:
        await waiting
    return (time.perf_counter() - start) * 1e3


async def in_box(box: Sandbox, argv: tuple[str, ...]) -> None:
    result = await box.exec(argv, limits=LIMITS)
    assert result.status is ExecStatus.OK, result


async def measure(n: int) -> list[dict[str, Any]]:
    bwrap, _ = find_bwrap()
    bare = bare_bwrap(bwrap)
    commands: dict[str, tuple[str, ...]] = {"true": ("/bin/true",)}
    if find_python() is not None:
        commands["python"] = python_argv("-c", "pass")
    rows = []
    pool = BubblewrapPool(SandboxConfig(max_boxes=2))
    try:
        for name, argv in commands.items():
            times: dict[str, list[float]] = {"box": [], "bwrap": [], "spawn": [], "fresh": []}
            async with pool.acquire() as box:
                for _ in range(n):
                    times["box"].append(await timed(lambda argv=argv: in_box(box, argv)))
                    times["bwrap"].append(await timed(lambda argv=argv: bare(argv)))
                    times["spawn"].append(await timed(lambda argv=argv: spawn(argv)))
                    times["fresh"].append(await timed(lambda argv=argv: fresh(pool, argv)))
            medians = {key: statistics.median(values) for key, values in times.items()}
            rows += rows_of(name, medians, n)
    finally:
        await pool.close()
    return rows


async def fresh(pool: BubblewrapPool, argv: tuple[str, ...]) -> None:
    async with pool.acquire() as box:
        await in_box(box, argv)


def rows_of(name: str, medians: dict[str, float], n: int) -> list[dict[str, Any]]:
    def row(key: str, peer: str, target: float | None, note: str) -> dict[str, Any]:
        ratio = medians[key] / medians[peer]
        return {
            "name": f"sandbox {name}: {note}",
            "value": round(medians[key], 3),
            "unit": "ms",
            "peer": {"bwrap": "bare bubblewrap", "spawn": "posix_spawn"}[peer],
            "peer_value": round(medians[peer], 3),
            "ratio": round(ratio, 3),
            "target": target,
            "ok": None if target is None else ratio <= target,
            "n": n,
            "note": "median" if target else "median; for comparison, no target",
        }

    return [
        row("box", "bwrap", 1.0, "exec in a live box"),
        row("box", "spawn", None, "exec in a live box"),
        row("fresh", "bwrap", TARGET_RATIO_TO_BWRAP, "acquire, exec, destroy"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="100 rounds instead of 400")
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    n = 100 if arguments.quick else 400
    try:
        rows = asyncio.run(measure(n))
    except UserError as error:
        keys = ("value", "peer_value", "ratio", "target", "ok")
        rows = [{"name": "sandbox", "unit": "ms", "peer": "bare bubblewrap", "n": 0}]
        rows[0] |= dict.fromkeys(keys) | {"note": str(error)}
    for row in rows:
        against = f"{row['peer']} {row['peer_value']} ms: {row['ratio']}x"
        print(f"{row['name']:<48} {row['value']} ms, {against}")
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
