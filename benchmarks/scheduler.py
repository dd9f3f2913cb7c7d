"""Which policy learns most from a budget: nine families of simulated domains, one without tiers.

    python benchmarks/scheduler.py [--quick] [--tier S|M|L] [--seeds N] [--plot FILE] [--json FILE]

Every policy runs on the same held-out seeds; tier L runs only those that rows name. `gap closed` is
the part of the way from uniform to an oracle that knows every domain's true gain. Targets stand in
the rows; a missed one says so. Domains without tiers have no target of their own but the one that
holds everywhere: never more than 1 % below equal cost.
"""

import argparse
import json
import os
import statistics
import time
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np

from burnish.plan.comparison import Comparison, compare_all, interval
from burnish.plan.learning.families import FAIR, FAMILIES, ORACLE, SCENARIOS, SIZED, UNTIERED
from burnish.plan.learning.starvation import drive_randomly
from burnish.plan.picture import draw
from burnish.plan.registry import scenario
from burnish.plan.scenario import Tier
from burnish.schedule.domains import DomainScheduler
from burnish.schedule.picks import DomainScheduleConfig
from burnish.schedule.values.names import PolicyName

EASY = ("clean", "traps", "cost_skew")
CHANGING = ("prerequisites", "interference", "non_stationary")


def row(
    name: str, value: float, unit: str, target: float | None, *, peer: str = "",
    peer_value: float = 0.0, at_least: bool = True, n: int = 0, note: str = "",
) -> dict[str, Any]:  # fmt: skip
    ok = None if target is None else bool(value >= target if at_least else value <= target)
    return {
        "name": name, "value": value, "unit": unit, "peer": peer or None,
        "peer_value": peer_value or None, "ratio": value if peer else None, "target": target,
        "ok": ok, "n": n, "note": note,
    }  # fmt: skip


def policies_of(family: str, *, full: bool) -> list[str]:
    """Every policy, or those that rows name."""
    if full:
        return [*(p.value for p in PolicyName), FAIR, ORACLE]
    needed = ["value", "uniform", "equal_cost", ORACLE]
    needed += ["sec", "dump"] if family in (*EASY, UNTIERED) else []
    return needed + ([FAIR] if family == "clean" else [])


def auc(done: Comparison, policy: str) -> float:
    return done.of(policy).metrics["auc"].mean


def family_rows(done: Comparison) -> list[dict[str, Any]]:
    name, n = done.scenario, done.num_seeds
    ours, uniform, oracle = auc(done, "value"), auc(done, "uniform"), auc(done, ORACLE)
    equal = auc(done, "equal_cost")
    spread = done.of("value").metrics["auc"].half_width
    rows = []
    if name in (*EASY, *CHANGING, UNTIERED):
        closed = (ours - uniform) / max(oracle - uniform, 1e-9)
        aim = {**dict.fromkeys(EASY, 0.85), **dict.fromkeys(CHANGING, 0.70)}.get(name)
        note = f"AUC {ours:.4f} +- {spread:.4f}, equal cost closes "
        note += f"{(equal - uniform) / max(oracle - uniform, 1e-9):.2f}"
        rows.append(row(f"{name}: gap closed", closed, "ratio", aim, n=n, note=note))
    for policy, aim in (("uniform", 1.20), ("equal_cost", 1.05), ("sec", 1.25), ("dump", 1.25)):
        if name not in (*EASY, UNTIERED):
            continue
        peer = auc(done, policy)
        rows.append(
            row(f"{name}: AUC over {policy}", ours / peer, "ratio", aim if name in EASY else None,
                peer=policy, peer_value=peer, n=n)
        )  # fmt: skip
    rows.append(
        row(f"{name}: AUC over equal_cost, floor", ours / equal, "ratio", 0.99,
            peer="equal_cost", peer_value=equal, n=n)
    )  # fmt: skip
    return rows


def other_rows(done: dict[str, Comparison], tier: Tier) -> list[dict[str, Any]]:
    traps, clean = done["traps"], done["clean"]
    n = traps.num_seeds

    def figure(c: Comparison, policy: str, name: str) -> float:
        return c.of(policy).metrics[name].mean

    share = figure(traps, "value", "trap_share") / figure(traps, "uniform", "trap_share")
    gap = max(figure(c, "value", "gap_p99") for c in done.values())
    late = sum(figure(c, "value", "late") for c in done.values())
    fair = figure(clean, FAIR, "gain_p5") - figure(clean, "equal_cost", "gain_p5")
    return [
        row("traps: share of uniform's", share, "ratio", 0.5, at_least=False, n=n),
        row("hacked verifier throttled after the audit", figure(traps, "value", "throttle_steps"),
            "steps", 50, at_least=False, n=n),
        row(f"p99 gap between services, tier {tier}", gap, "steps", 30, at_least=False, n=n,
            note="the worst family"),
        row("steps waited beyond the simulated bound", late, "count", 0, at_least=False, n=n),
        row("P5 gain with fairness 0.5, less equal cost's", fair, "ratio", 0.0, n=n),
    ]  # fmt: skip


def static_row() -> dict[str, Any]:
    """Trained-token ratios under filters, failures and staleness, with declared weights."""
    from burnish.plan.learning.ratio_check import ratio_error

    errors = [ratio_error(seed) for seed in range(1000, 1010)]
    return row("static: trained-token ratio error over 20 steps, L1", statistics.mean(errors),
               "ratio", 0.02, at_least=False, n=10, note=f"worst {max(errors):.4f}")  # fmt: skip


def gap_row(num_seeds: int) -> dict[str, Any]:
    """Waits with 300 domains, where costs differ most and where costs vary most."""
    families = [s for s in SCENARIOS if s.name in ("cost_skew", "heavy_tail")]
    done = compare_all([(s, ["value"]) for s in families], Tier.M, num_seeds)
    gaps = [c.of("value").metrics["gap_p99"].mean for c in done]
    note = f"longest {max(c.of('value').metrics['gap_max'].mean for c in done):.0f}"
    return row("p99 gap between services, 300 domains", max(gaps), "steps", 30,
               at_least=False, n=num_seeds, note=note)  # fmt: skip


def size_rows(done: dict[str, Comparison], tier: Tier) -> list[dict[str, Any]]:
    """Groups of 4 to 16 by what their task's tier is likely to teach, against groups of 8.

    The budget is the same; ratios are of worlds of equal seeds, so that worlds do not blur them.
    """
    families = [s for s in SCENARIOS if s.name in ("clean", "traps")]
    num_seeds = done["clean"].num_seeds
    sized = compare_all([(s, [SIZED]) for s in families], tier, num_seeds)
    rows = []
    for c in sized:
        pairs = zip(c.of(SIZED).trials, done[c.scenario].of("value").trials, strict=True)
        ratio = interval([a.metrics["auc"] / b.metrics["auc"] for a, b in pairs])
        note = f"+- {ratio.half_width:.4f} (95 %), the same budget and worlds"
        name = f"{c.scenario}: AUC of groups of 4 to 16 over groups of 8"
        rows.append(row(name, ratio.mean, "ratio", None, n=num_seeds, note=note))
    return rows


def speed_rows(num_domains: int, num_queued: int, num_decisions: int) -> list[dict[str, Any]]:
    """Decisions while `num_queued` groups wait for their turn: one is judged, one is added.

    In processor time, so that it is one core's whatever else the machine does.
    """
    names = [f"d{i}" for i in range(num_domains)]
    scheduler = DomainScheduler(names, DomainScheduleConfig(warmup_picks=0))
    queued = deque(_next(scheduler) for _ in range(num_queued))
    rng = np.random.default_rng(0)
    rates, costs = rng.random(num_decisions), rng.lognormal(3.0, 1.0, num_decisions)
    taken = []
    for i in range(num_decisions):
        start = time.process_time()
        queued.append(_next(scheduler))
        scheduler.observe(queued.popleft(), pass_rate=float(rates[i]), mean_score=0.5,
                          num_rollouts=8, cost_tokens=float(costs[i]), step=i // 512)  # fmt: skip
        taken.append(time.process_time() - start)
    p99 = sorted(taken)[int(0.99 * len(taken))] * 1e3
    rate = len(taken) / sum(taken)
    note = f"with their observations, share updates every 512 groups, {num_queued:,} groups queued"
    return [
        row("decisions, 1,000 domains", rate, "1/s", 10_000, n=num_decisions, note=note),
        row("decision p99, 1,000 domains", p99, "ms", 5.0, at_least=False, n=num_decisions),
    ]


def _next(scheduler: DomainScheduler) -> str:
    pick = scheduler.next()
    assert pick is not None
    return pick.domain


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--tier", default="s", type=str.lower, choices=[t.value for t in Tier])
    parser.add_argument("--seeds", type=int, default=0)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    tier = Tier(options.tier)
    seeds = options.seeds or (2 if options.quick else 5)
    full = not options.quick and tier is not Tier.L
    nine = [s for s in SCENARIOS if s.name != UNTIERED]
    start, before = time.perf_counter(), os.times()
    wanted = [(s, policies_of(s.name, full=full)) for s in nine]
    compared = compare_all(wanted, tier, seeds)
    took, after = time.perf_counter() - start, os.times()
    busy = after.children_user + after.children_system
    busy -= before.children_user + before.children_system
    compared += compare_all([(scenario(UNTIERED), policies_of(UNTIERED, full=False))], tier, seeds)
    done = {c.scenario: c for c in compared}
    rows = [r for name in FAMILIES for r in family_rows(done[name])]
    rows += other_rows(done, tier)
    rows.append(static_row())
    steps = 10_000 if options.quick else 1_000_000
    late = drive_randomly(steps, seed=1000)
    rows.append(row("waits beyond the bound: joins, weights, outages, quarantines", late,
                    "count", 0, at_least=False, n=steps))  # fmt: skip
    if tier is Tier.S:
        rows += size_rows(done, tier)
        rows.append(gap_row(1 if options.quick else 2))
    rows += speed_rows(1000, 100_000, 5_000 if options.quick else 20_000)
    limit = {Tier.S: 60, Tier.M: 600, Tier.L: 900}[tier]
    num = sum(len(policies) for _, policies in wanted)
    name = f"tier {tier}: nine families, {num} pairs of family and policy, {seeds} seeds"
    note = f"{busy:.0f} s of processor time, other work on the machine is in the first figure"
    rows.append(row(name, took, "s", limit, at_least=False, n=1, note=note))
    for r in rows:
        mark = {True: "ok  ", False: "MISS", None: "    "}[r["ok"]]
        target = "" if r["target"] is None else f"target {r['target']:g}"
        print(f"{mark} {r['name']:60} {r['value']:10.4g} {r['unit']:6} {target:11}  {r['note']}")
    if options.plot:
        draw(list(done.values()), options.plot)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
