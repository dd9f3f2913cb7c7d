"""The twin of a real run: domains and machines fitted to what it recorded.

Tokens per turn and turns come from the rollouts. The time of an engine's step is a line in the
number of sequences, a + c * b, fitted to the training steps' mean time between tokens. What an
episode took beyond its decoding is tools and verdict. The trainer is its seconds per token.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

import numpy as np

from burnish.core.errors import UserError
from burnish.core.records import Rollout
from burnish.plan.pipeline.contract import ClusterModel
from burnish.plan.pipeline.engines import EngineModel
from burnish.plan.pipeline.workload import TOOL_SIGMA, SimDomain, Workload
from burnish.store.metrics import Series
from burnish.store.reader import RunReader
from burnish.telemetry import catalogue
from burnish.telemetry.metrics import Metric

_REWARD_SIGMA = 0.6
# Nothing takes no time at all; the simulator draws logarithms.
_INSTANT_S = 1e-4


class StepFigures(NamedTuple):
    """What one training step of a real run tells of the machines."""

    inter_token_s: float
    """Mean time between two tokens of a sequence."""
    tokens_per_busy_s: float
    """Sampled by the engine while it computes."""
    trainer_s: float
    """Of training."""
    trained_tokens: float
    """Sampled tokens that were trained."""
    publish_s: float
    """Handing the weights over."""
    step_s: float
    """Wall clock."""


class Twin(NamedTuple):
    """What a simulator needs to replay a run."""

    workload: Workload
    """Its domains."""
    cluster: ClusterModel
    """One engine and one trainer, side by side."""
    inter_token_s: float
    """Mean, for reports."""


def step_figures(series: Series, first_step: int = 1) -> list[StepFigures]:
    """Of all steps from `first_step` that have all of them."""

    def column(metric: Metric) -> dict[int, float]:
        return dict(series.get(metric.name, {}).get("", []))

    gaps, rates = column(catalogue.ENGINE_INTER_TOKEN_MEAN), column(catalogue.ENGINE_TOKENS_PER_S)
    busy, trainer = column(catalogue.ENGINE_BUSY_RATIO), column(catalogue.TRAINER_BUSY_RATIO)
    walls, publish = column(catalogue.STEP_SECONDS), column(catalogue.PUBLICATION_SECONDS)
    trained: dict[int, float] = defaultdict(float)
    for points in series.get(catalogue.TRAINED_TOKENS.name, {}).values():
        for step, tokens in points:
            trained[step] += tokens
    steps = sorted(set(gaps) & set(rates) & set(busy) & set(trainer) & set(walls) & set(trained))
    return [
        StepFigures(
            inter_token_s=gaps[s],
            tokens_per_busy_s=rates[s] / max(busy[s], 1e-9),
            trainer_s=trainer[s] * walls[s],
            trained_tokens=trained[s],
            publish_s=publish.get(s, 0.0),
            step_s=walls[s],
        )
        for s in steps
        if s >= first_step
    ]


def fit_twin(readers: Sequence[RunReader], *, num_slots: int, first_step: int = 2) -> Twin:
    """The twin of runs on one machine with the same domains.

    Args:
        readers: their records; several loads tell more of the engine.
        num_slots: sequences that the engine decodes together.
        first_step: what came before is warm-up.

    Raises:
        UserError: no run has finished enough steps.
    """
    figures = [f for reader in readers for f in step_figures(reader.metrics(), first_step)]
    if len(figures) < 2:
        raise UserError(
            f"{readers[0].path} has fewer than two measured steps.",
            fix="take the records of a longer run with the local engine.",
        )
    engine = fit_engine(figures, num_slots)
    by_domain: dict[str, list[Rollout]] = defaultdict(list)
    for reader in readers:
        for stored in reader.rollouts():
            if stored.rollout.verdict.score is not None:
                by_domain[stored.rollout.domain].append(stored.rollout)
    gap = fmean(f.inter_token_s for f in figures)
    domains = [
        fit_domain(f"d{i}", by_domain[name], gap) for i, name in enumerate(sorted(by_domain))
    ]
    tokens, seconds = sum(f.trained_tokens for f in figures), sum(f.trainer_s for f in figures)
    cluster = ClusterModel(
        num_accelerators=2,
        train_ratio=0.5,
        engine=engine,
        train_tokens_per_s=tokens / max(seconds, 1e-9),
        publish_s=fmean(f.publish_s for f in figures),
    )
    return Twin(Workload(tuple(domains)), cluster, gap)


def fit_engine(figures: Sequence[StepFigures], num_slots: int) -> EngineModel:
    """Least squares of the time between tokens over the number of sequences; no negative slope."""
    gaps = np.array([f.inter_token_s for f in figures])
    # By Little's law: sequences in a step are tokens per second times the time that each takes.
    sequences = np.array([f.tokens_per_busy_s * f.inter_token_s for f in figures])
    spread = sequences - sequences.mean()
    variance = float((spread**2).sum())
    slope = float((spread * (gaps - gaps.mean())).sum()) / variance if variance > 1e-9 else 0.0
    slope = max(slope, 0.0)
    alone = float(gaps.mean() - slope * sequences.mean())
    if alone <= 0.0:
        # All cost is per sequence: a line through the origin.
        slope, alone = float(gaps.mean() / sequences.mean()), 1e-6
    half = alone / slope if slope > 0.0 else math.inf
    return EngineModel(num_slots=num_slots, speed=1.0 / alone, half=half)


def fit_domain(name: str, rollouts: Sequence[Rollout], inter_token_s: float) -> SimDomain:
    """Lengths, turns, and the time beside decoding."""
    segments = [max(turn.end - turn.start, 1) for r in rollouts for turn in r.turns]
    logs = np.log(segments)
    turns = fmean(len(r.turns) for r in rollouts)
    other_s = fmean(
        max(r.duration_s - r.num_sampled_tokens * inter_token_s, _INSTANT_S) for r in rollouts
    )
    is_agent = turns > 1.0
    # Medians of lognormal times whose means are what was measured.
    tool_s = other_s / max(turns - 1.0, 1e-9) / math.exp(TOOL_SIGMA**2 / 2)
    return SimDomain(
        name=name,
        is_agent=is_agent,
        segment_tokens=float(np.exp(logs.mean())),
        segment_sigma=float(logs.std()),
        mean_turns=turns,
        tool_s=tool_s if is_agent else 0.0,
        reset_s=_INSTANT_S if is_agent else 0.0,
        reward_s=_INSTANT_S if is_agent else other_s / math.exp(_REWARD_SIGMA**2 / 2),
        reward_hang_ratio=0.0,
        crash_ratio=0.0,
    )
