"""Policies on one scenario over several seeds, with intervals."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any, NamedTuple

from burnish.core.errors import UserError
from burnish.plan.registry import scenario as by_name
from burnish.plan.scenario import Curve, Scenario, Tier, Trial

# Seeds that no constant was chosen on. Those below 1000 were used for that, those from 1000 on were
# looked at in between.
HELD_OUT_SEED = 2000
_MOST_SEEDS = 10_000
# Two-sided 95 % quantiles of Student's t by degrees of freedom; the normal one beyond.
_T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160)


class Interval(NamedTuple):
    """A mean over seeds."""

    mean: float
    """Of the seeds that have the figure; nan if none has."""
    half_width: float
    """Of the 95 % interval; nan from one seed."""

    def text(self, sign: str) -> str:
        """For people: "-" where nothing was measured, no interval from a single seed."""
        if math.isnan(self.mean):
            return "-"
        if math.isnan(self.half_width):
            return f"{self.mean:.4g}"
        return f"{self.mean:.4g} {sign} {self.half_width:.2g}"


class Result(NamedTuple):
    """One policy."""

    policy: str
    """Its name."""
    metrics: dict[str, Interval]
    """Over seeds."""
    trials: tuple[Trial, ...]
    """By seed."""


class Comparison(NamedTuple):
    """All policies on one scenario."""

    scenario: str
    """Its name."""
    tier: Tier
    """How large."""
    num_seeds: int
    """Worlds."""
    results: tuple[Result, ...]
    """Best first, by the first metric."""

    @property
    def seeds_text(self) -> str:
        """How many worlds, for people."""
        return "1 seed" if self.num_seeds == 1 else f"{self.num_seeds} seeds"

    def of(self, policy: str) -> Result:
        """The result of a policy that was asked for."""
        return next(r for r in self.results if r.policy == policy)


def tier_of(text: str) -> Tier:
    """A tier by its letter.

    Raises:
        UserError: for another letter.
    """
    try:
        return Tier(text.lower())
    except ValueError:
        raise UserError(f"There is no tier {text!r}.", fix="use s, m or l.") from None


def interval(values: Sequence[float]) -> Interval:
    """Student's interval of a mean."""
    known = [v for v in values if not math.isnan(v)]
    if not known:
        return Interval(math.nan, math.nan)
    mean = sum(known) / len(known)
    if len(known) == 1:
        return Interval(mean, math.nan)
    variance = sum((v - mean) ** 2 for v in known) / (len(known) - 1)
    df = len(known) - 1
    quantile = _T95[df - 1] if df <= len(_T95) else 1.96
    return Interval(mean, quantile * math.sqrt(variance / len(known)))


def compare(
    scenario: Scenario,
    policies: Sequence[str],
    tier: Tier,
    num_seeds: int,
    *,
    first_seed: int = HELD_OUT_SEED,
) -> Comparison:
    """Run every policy on the same seeds, on all cores.

    Raises:
        UserError: for a policy that the scenario does not know, or no seeds.
    """
    return compare_all([(scenario, policies)], tier, num_seeds, first_seed=first_seed)[0]


def compare_all(
    wanted: Sequence[tuple[Scenario, Sequence[str]]],
    tier: Tier,
    num_seeds: int,
    *,
    first_seed: int = HELD_OUT_SEED,
) -> list[Comparison]:
    """Run the policies of every scenario on the same seeds, in one set of processes.

    Raises:
        UserError: for a policy that its scenario does not know, or no seeds.
    """
    for scenario, policies in wanted:
        unknown = [p for p in policies if p not in scenario.policies()]
        if unknown:
            known = ", ".join(scenario.policies())
            raise UserError(
                f"{scenario.name} has no policy {unknown[0]!r}.", fix=f"use one of {known}."
            )
    if num_seeds < 1:
        raise UserError(f"{num_seeds} seeds show nothing.", fix="use --seeds 3 or more.")
    if num_seeds > _MOST_SEEDS:
        what = f"{num_seeds} seeds are more than the {_MOST_SEEDS} that can be held."
        raise UserError(what, fix="use --seeds 100: intervals shrink with its root.")
    seeds = range(first_seed, first_seed + num_seeds)
    trials = iter(_run_all([(s.name, p, tier, i) for s, ps in wanted for p in ps for i in seeds]))
    done = []
    for scenario, policies in wanted:
        results = [_result(p, tuple(next(trials) for _ in seeds)) for p in policies]
        results.sort(key=lambda r: -next(iter(r.metrics.values())).mean)
        done.append(Comparison(scenario.name, tier, num_seeds, tuple(results)))
    return done


def _result(policy: str, trials: tuple[Trial, ...]) -> Result:
    metrics = {n: interval([t.metrics[n] for t in trials]) for n in trials[0].metrics}
    return Result(policy, metrics, trials)


def record(comparison: Comparison) -> dict[str, Any]:
    """For programs; figures that do not exist are null."""

    def number(value: float) -> float | None:
        return None if math.isnan(value) else value

    return {
        "scenario": comparison.scenario,
        "tier": comparison.tier.value,
        "num_seeds": comparison.num_seeds,
        "results": [
            {
                "policy": r.policy,
                "metrics": {
                    n: {"mean": number(i.mean), "half_width_95": number(i.half_width)}
                    for n, i in r.metrics.items()
                },
            }
            for r in comparison.results
        ],
    }


def mean_curve(trials: Sequence[Trial], number: int = 0) -> Curve:
    """The pointwise mean of one curve over seeds."""
    curves = [t.curves[number] for t in trials]
    points = tuple(
        (ps[0][0], sum(y for _, y in ps) / len(ps))
        for ps in zip(*(c.points for c in curves), strict=True)
    )
    return Curve(curves[0].name, curves[0].x_label, points)


def _run_all(jobs: Sequence[tuple[str, str, Tier, int]]) -> list[Trial]:
    workers = min(len(jobs), os.cpu_count() or 1)
    if workers <= 1:
        return [_run(job) for job in jobs]
    # Spawned, since a fork would copy the threads' locks of whoever calls.
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        return list(pool.map(_run, jobs, chunksize=max(len(jobs) // (8 * workers), 1)))


def _run(job: tuple[str, str, Tier, int]) -> Trial:
    name, policy, tier, seed = job
    return by_name(name).run(policy, tier, seed)
