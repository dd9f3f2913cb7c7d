"""Made-up domains whose episodes are as skewed as the published ones.

Response lengths are lognormal with sigma 0.95 to 1.0 (fits both RollPacker's maximum over median
and Laminar's p99 over p50); agents take a lognormal number of turns with tool calls in between; a
few images are broken. Every number is drawn from the seed alone.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

# Part of the domains of agents whose image is broken.
_BROKEN_RATIO = 0.12
_AGENT_RATIO = 0.35
TOOL_SIGMA = 1.1
"""Of the logarithm of a tool call's seconds."""


class SimDomain(NamedTuple):
    """How the episodes of a domain behave."""

    name: str
    """`d17`."""
    is_agent: bool
    """Whether there are turns with tool calls, and a reset."""
    segment_tokens: float
    """Median tokens of one turn."""
    segment_sigma: float
    """Of their logarithm."""
    mean_turns: float
    """Of an episode."""
    tool_s: float
    """Median seconds of a tool call; 0.0 without."""
    reset_s: float
    """Median seconds of the reset; 0.0 without."""
    reward_s: float
    """Median seconds of the judgement."""
    reward_hang_ratio: float
    """Judgements that run into their time limit."""
    crash_ratio: float
    """Tool calls that fail."""


class Workload(NamedTuple):
    """A mix of domains and the limits of an episode."""

    domains: tuple[SimDomain, ...]
    """All of them."""
    call_timeout_s: float = 120.0
    """After which a tool call has failed."""
    reward_timeout_s: float = 30.0
    """After which a hanging judgement is cut off and counts as wrong."""
    max_tokens: int = 32_768
    """Of an episode."""
    max_turns: int = 60
    """Of an episode."""


HEALTHY_RATIO = 0.1
"""Attempts that may fail in a domain that should be left alone."""
BROKEN_RATIO = 0.6
"""Attempts that fail in a domain that only burns slots. Between the two, either is right."""


def failure_ratio(domain: SimDomain, workload: Workload) -> float:
    """Attempts of a domain that fail, in the mean over its episodes."""
    if not domain.is_agent:
        return 0.0
    z = (math.log(workload.call_timeout_s) - math.log(domain.tool_s)) / TOOL_SIGMA
    late = 0.5 * math.erfc(z / math.sqrt(2.0))
    call = domain.crash_ratio + (1.0 - domain.crash_ratio) * late
    # Turns beyond the first are Poisson; this is the generating function of their number.
    return 1.0 - math.exp(-call * (domain.mean_turns - 1.0))


def draw_workload(
    num_domains: int,
    seed: int,
    *,
    tail: float = 1.0,
    skew: float = 1.0,
    broken_ratio: float = _BROKEN_RATIO,
) -> Workload:
    """Draw a mix.

    Args:
        num_domains: how many.
        seed: root of all draws.
        tail: multiplies the sigma of lengths.
        skew: multiplies the spread of typical lengths between domains.
        broken_ratio: part of the agents' domains whose image is broken.
    """
    rng = np.random.default_rng([seed, 1])
    drawn = [_domain(i, rng, tail, skew) for i in range(num_domains)]
    agents = [i for i, d in enumerate(drawn) if d.is_agent]
    num_broken = round(broken_ratio * len(agents))
    for i in rng.choice(agents, size=num_broken, replace=False) if num_broken else ():
        crash = float(rng.uniform(0.15, 0.5))
        drawn[i] = drawn[i]._replace(crash_ratio=crash)
    return Workload(tuple(drawn))


def _domain(i: int, rng: np.random.Generator, tail: float, skew: float) -> SimDomain:
    is_agent = bool(rng.random() < _AGENT_RATIO)
    median, spread = (450.0, 0.5) if is_agent else (2200.0, 0.9)
    judge = int(rng.integers(0, 3))
    return SimDomain(
        name=f"d{i}",
        is_agent=is_agent,
        segment_tokens=math.exp(rng.normal(math.log(median), spread * skew)),
        segment_sigma=(0.8 if is_agent else 0.97) * tail,
        mean_turns=float(np.clip(rng.lognormal(math.log(9), 0.6), 3, 40)) if is_agent else 1.0,
        tool_s=math.exp(rng.normal(math.log(2.5), 0.9)) if is_agent else 0.0,
        reset_s=math.exp(rng.normal(math.log(8.0), 0.8)) if is_agent else 0.0,
        # A rule, a program with tests, a judge model.
        reward_s=(0.05, 2.5, 3.5)[judge],
        reward_hang_ratio=0.05 if judge == 1 else 0.0,
        crash_ratio=float(rng.uniform(0.001, 0.006)) if is_agent else 0.0,
    )
