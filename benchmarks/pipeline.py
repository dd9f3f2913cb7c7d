"""What flow control is worth: the real run's objects in a simulated pipeline, beside other systems.

    python benchmarks/pipeline.py [--quick] [--accelerators N] [--json FILE]

32 accelerators, 300 domains (a third of them agents, an eighth of those with a broken image),
batches of 128 groups of 16. Every system sees the same workload; seeds 0 and up were never used to
choose a constant (those were 100 to 105). APRIL is tuned on each seed by its own result. Its
engines compute the keys and values of cut-off sequences again after each training; with that for
free it is in a row of its own. Figures are means over seeds of steps after the warm-up.

How many times the barrier a system can reach depends on the draw of domains and on the size: the
barrier's step ends with the slowest of its episodes, an agent whose slow tools time out and that is
tried four times. With 32 accelerators that is one of 2,048, and on seeds 0 to 6 the barrier trains
4,900 to 6,100 tokens/s, so that perfect packing, 19,300, would be 3.1 to 3.9 times as fast; the
target of four times came from a trial with one draw of that size, whose barrier ran at 3,700, and
at 4,700 to 5,700 on the six draws after it. `--accelerators 1024` is tier M with batches in
proportion: the barrier waits longer for the slowest of 65,536. Only flow and barrier run then.
"""

import argparse
import functools
import json
import statistics
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from burnish.plan.pipeline.contract import ClusterModel, System
from burnish.plan.pipeline.flow_system import Flow
from burnish.plan.pipeline.result import PipelineResult
from burnish.plan.pipeline.simulator import Simulator
from burnish.plan.pipeline.systems import April, AsyncCap, SyncBarrier
from burnish.plan.pipeline.workload import HEALTHY_RATIO, draw_workload, failure_ratio

BATCH, GROUP, LAG = 128, 16, 4
SMALL = 32
TRAIN_RATIO = 0.37
APRIL = (1.5, 2.0, 2.5, 3.0)
SYSTEMS = ("sync", *(f"april {o}" for o in APRIL), *(f"april free {o}" for o in APRIL),
           "async", "flow", "flow without breakers", "flow with rounds")  # fmt: skip
FAMILIES = {"mixed": {}, "heavy tail": {"tail": 1.3}, "cost skew": {"skew": 1.6},
            "outages": {"broken_ratio": 0.35}}  # fmt: skip


def build(name: str, size: int = SMALL) -> tuple[System, ClusterModel]:
    """A system on `size` accelerators, with batches in proportion."""
    cluster = ClusterModel(num_accelerators=size)
    batch = BATCH * size // SMALL
    if name == "sync":
        return SyncBarrier(batch), cluster
    if name.startswith("april"):
        free = "free" in name
        over = float(name.rsplit(" ", 1)[1])
        return April(batch, over), cluster._replace(prefill_tokens_per_s=0.0 if free else 9600.0)
    split = cluster._replace(train_ratio=TRAIN_RATIO)
    if name == "async":
        return AsyncCap(batch, LAG, 1.0), split
    rounds = LAG if "rounds" in name else 0
    return Flow(batch, LAG, with_breakers="without" not in name, round_max_wait=rounds), split


def trial(job: tuple[str, str, int, int, int]) -> tuple[str, str, PipelineResult]:
    family, name, seed, steps, size = job
    workload = draw_workload(300, seed, **FAMILIES[family])
    system, cluster = build(name, size)
    result = Simulator(workload, cluster, system, seed=seed, group_size=GROUP).run(steps, 3)
    if isinstance(system, Flow) and name == "flow":
        eight = [d for d in system.num_failed if system.num_failed[d] >= 8]
        sick = {d.name for d in workload.domains if failure_ratio(d, workload) >= 0.6}
        healthy = [d for d in workload.domains if failure_ratio(d, workload) <= HEALTHY_RATIO]
        result = result._replace(
            open_attempts=tuple(a for a, _ in system.opened.values()),
            open_s=tuple(s for _, s in system.opened.values()),
            num_never_opened=len(sick & set(eight) - set(system.opened)),
            num_false_opens=len(set(system.false_opens)),
            num_healthy=len(healthy),
        )
    return family, name, result


def mean(results: list[PipelineResult], field: str) -> float:
    return statistics.fmean(getattr(r, field) for r in results)


def row_of(n: int, name: str, value: float, unit: str, peer: str, peer_value: float | None,
           target: float | None, *, least: bool, ratio: float | None = None,
           note: str = "") -> dict[str, Any]:  # fmt: skip
    measured = value if ratio is None else ratio
    ok = None if target is None else (measured >= target if least else measured <= target)
    return {"name": name, "value": value, "unit": unit, "peer": peer, "peer_value": peer_value,
            "ratio": ratio, "target": target, "ok": ok, "n": n, "note": note}  # fmt: skip


def large_rows(
    family: str, found: dict[str, list[PipelineResult]], size: int
) -> list[dict[str, Any]]:
    """What the small cluster cannot tell."""
    flow, sync = found["flow"], found["sync"]
    most = build("flow", size)[1].most_tokens_per_s
    speed, slow = mean(flow, "tokens_per_s"), mean(sync, "tokens_per_s")
    row = functools.partial(row_of, len(flow))
    name = f"{family}, {size:,} accelerators: "
    return [
        row(f"{name}trained tokens/s against the barrier", speed, "tokens/s", "sync", slow, 4.0,
            least=True, ratio=speed / slow, note=f"perfect packing would reach {most / slow:.2f}"),
        row(f"{name}slot load", mean(flow, "slot_load"), "ratio", "sync",
            mean(sync, "slot_load"), 0.93, least=True),
        row(f"{name}idle accelerators", mean(flow, "idle_ratio"), "ratio", "sync",
            mean(sync, "idle_ratio"), 0.05, least=False),
        row(f"{name}wasted tokens", mean(flow, "waste_ratio"), "ratio", "sync",
            mean(sync, "waste_ratio"), 0.03, least=False),
        row(f"{name}wait for a slot, p99", mean(flow, "queue_p99_s"), "s", "sync",
            mean(sync, "queue_p99_s"), 2.0, least=False),
    ]  # fmt: skip


def rows_of(family: str, found: dict[str, list[PipelineResult]]) -> list[dict[str, Any]]:
    n, most = len(found["flow"]), build("flow")[1].most_tokens_per_s
    flow, plain = found["flow"], found["flow without breakers"]
    speed = {name: mean(results, "tokens_per_s") for name, results in found.items()}

    def tuned(kind: str) -> float:
        return statistics.fmean(
            max(found[f"{kind} {o}"][i].tokens_per_s for o in APRIL) for i in range(n)
        )

    def row(name: str, *of: Any, **options: Any) -> dict[str, Any]:
        return row_of(n, f"{family}: {name}", *of, **options)

    best, free = tuned("april"), tuned("april free")
    failures = mean(flow, "failed_per_step") / max(mean(plain, "failed_per_step"), 1e-9)
    per_token = (mean(flow, "num_failed") / speed["flow"]) / max(
        mean(found["sync"], "num_failed") / speed["sync"], 1e-9
    )
    opens = sorted(a for r in flow for a in r.open_attempts)
    seconds = [s for r in flow for s in r.open_s]
    late = sum(
        a > 8 and s > 60 for r in flow for a, s in zip(r.open_attempts, r.open_s, strict=True)
    )
    late += sum(r.num_never_opened for r in flow)
    false = sum(r.num_false_opens for r in flow) / max(sum(r.num_healthy for r in flow), 1)
    median = opens[len(opens) // 2] if opens else 0
    return [
        row("trained tokens/s against the barrier", speed["flow"], "tokens/s", "sync",
            speed["sync"], 4.0, least=True, ratio=speed["flow"] / speed["sync"],
            note=f"perfect packing would reach {most / speed['sync']:.2f}"),
        row("trained tokens/s against perfect packing", speed["flow"], "tokens/s",
            "no wait, no loss", most, None, least=True, ratio=speed["flow"] / most),
        row("trained tokens/s against APRIL", speed["flow"], "tokens/s", "APRIL, best of 4",
            best, 1.05, least=True, ratio=speed["flow"] / best),
        row("the same, its resumption free", speed["flow"], "tokens/s", "APRIL, best of 4",
            free, None, least=True, ratio=speed["flow"] / free),
        row("trained tokens/s against a cap in flight", speed["flow"], "tokens/s", "async",
            speed["async"], None, least=True, ratio=speed["flow"] / speed["async"]),
        row("with rounds of long groups", speed["flow with rounds"], "tokens/s", "flow",
            speed["flow"], None, least=True, ratio=speed["flow with rounds"] / speed["flow"],
            note=f"lag {mean(found['flow with rounds'], 'lag_mean'):.1f}, "
                 f"without {mean(flow, 'lag_mean'):.1f}"),
        row("slot load", mean(flow, "slot_load"), "ratio", "async",
            mean(found["async"], "slot_load"), 0.93, least=True),
        row("idle accelerators", mean(flow, "idle_ratio"), "ratio", "sync",
            mean(found["sync"], "idle_ratio"), 0.05, least=False),
        row("wasted tokens", mean(flow, "waste_ratio"), "ratio", "without breakers",
            mean(plain, "waste_ratio"), 0.03, least=False),
        row("wait for a slot, p99", mean(flow, "queue_p99_s"), "s", "APRIL 2.0",
            mean(found["april 2.0"], "queue_p99_s"), 2.0, least=False),
        row("failed attempts per step", mean(flow, "failed_per_step"), "attempts",
            "sync, per token", mean(found["sync"], "failed_per_step"), 0.2, least=False,
            ratio=per_token, note=f"{failures:.2f} of the same system without breakers"),
        row("breakers that open after 8 attempts and 60 s", late / max(len(opens), 1), "ratio",
            "", None, 0.05, least=False,
            note=f"{len(opens)} broken domains, median {median} attempts, "
                 f"{statistics.median(seconds or [0.0]):.0f} s from the first failure"),
        row("healthy domains ever paused", false, "ratio", "", None, 0.01, least=False),
    ]  # fmt: skip


def tail_row(
    light: dict[str, list[PipelineResult]], heavy: dict[str, list[PipelineResult]]
) -> dict[str, Any]:
    """What a third more spread in lengths costs, and what it costs the barrier."""
    before, now = (mean(found["flow"], "tokens_per_s") for found in (light, heavy))
    barrier = mean(heavy["sync"], "tokens_per_s") / mean(light["sync"], "tokens_per_s")
    return {"name": "heavy tail: trained tokens/s against the lighter tail", "value": now,
            "unit": "tokens/s", "peer": "mixed", "peer_value": before, "ratio": now / before,
            "target": 0.9, "ok": now >= 0.9 * before, "n": len(heavy["flow"]),
            "note": f"the barrier keeps {barrier:.2f}"}  # fmt: skip


def show(row: dict[str, Any]) -> str:
    value = row["value"] if row["ratio"] is None else row["ratio"]
    peer = "" if row["peer_value"] is None else f"  {row['peer']}: {row['peer_value']:,.3f}"
    mark = {True: "ok  ", False: "MISS", None: "    "}[row["ok"]]
    target = "" if row["target"] is None else f" (target {row['target']:g})"
    shown = f"{mark} {row['name']}: {value:,.3f}{target}  [{row['value']:,.3f} {row['unit']}]"
    return f"{shown}{peer}  {row['note']}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--family", action="append", choices=list(FAMILIES))
    parser.add_argument("--accelerators", type=int, default=SMALL, metavar="N")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    seeds, steps = (1, 8) if options.quick else (3, 12)
    families = options.family or (["mixed"] if options.quick else list(FAMILIES))
    size = options.accelerators
    systems = SYSTEMS if size == SMALL else ("sync", "flow")
    if size < SMALL:
        parser.error(f"--accelerators {size}: at least {SMALL}")
    found: dict[str, dict[str, list[PipelineResult]]] = {f: {} for f in families}
    rows: list[dict[str, Any]] = []

    def tell(new: list[dict[str, Any]]) -> None:
        rows.extend(new)
        print(*map(show, new), sep="\n", flush=True)

    with ProcessPoolExecutor(2) as pool:
        for family in families:
            jobs = [(family, name, seed, steps, size) for name in systems for seed in range(seeds)]
            for _, name, result in pool.map(trial, jobs):
                found[family].setdefault(name, []).append(result)
            small = size == SMALL
            tell(
                rows_of(family, found[family]) if small else large_rows(family, found[family], size)
            )
    if {"mixed", "heavy tail"} <= set(families) and size == SMALL:
        tell([tail_row(found["mixed"], found["heavy tail"])])
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
