"""How well `static` holds declared ratios on trained tokens through the run's scheduler."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import numpy as np

from burnish.schedule.domains import DomainScheduler
from burnish.schedule.picks import DomainScheduleConfig, DomainShare
from burnish.schedule.values.names import PolicyName

_GROUPS_PER_STEP = 256
# Groups in flight when a decision is made: one batch of lag.
_IN_FLIGHT = 256
_STEPS = 20
_WARM_STEPS = 20


class _Flying(NamedTuple):
    domain: str
    tokens: float
    cost: float
    scored: bool


def ratio_error(seed: int, num_domains: int = 8) -> float:
    """L1 distance of trained-token ratios from the declared ones over 20 steps.

    Lengths differ tenfold between domains; 10 to 60 % of groups are filtered, 5 % fail and 3 % go
    stale. Groups settle a batch after they were dispatched. The first steps only learn the rates.
    """
    rng = np.random.default_rng(seed)
    names = [f"d{i}" for i in range(num_domains)]
    weights = rng.dirichlet(np.full(num_domains, 3.0)) + 0.02
    length = dict(zip(names, np.exp(rng.normal(6.0, 0.8, num_domains)), strict=True))
    filtered = dict(zip(names, rng.uniform(0.1, 0.6, num_domains), strict=True))
    shares = {n: DomainShare(weight=float(w)) for n, w in zip(names, weights, strict=True)}
    scheduler = DomainScheduler(
        names, DomainScheduleConfig(policy=PolicyName.STATIC, domains=shares, floor=0.05)
    )
    flying: deque[_Flying] = deque()
    trained = dict.fromkeys(names, 0.0)
    total = _GROUPS_PER_STEP * (_WARM_STEPS + _STEPS)
    for i in range(total):
        pick = scheduler.next()
        assert pick is not None
        sampled = 8.0 * length[pick.domain] * float(rng.lognormal(0.0, 0.4))
        fails = rng.random() < 0.05
        lost = fails or rng.random() < 0.03 or rng.random() < filtered[pick.domain]
        flying.append(_Flying(pick.domain, 0.0 if lost else sampled, sampled, not fails))
        if len(flying) <= _IN_FLIGHT:
            continue
        back = flying.popleft()
        scheduler.observe(
            back.domain,
            pass_rate=0.5,
            mean_score=0.5,
            num_rollouts=8 * back.scored,
            cost_tokens=back.cost,
            step=i // _GROUPS_PER_STEP,
        )
        scheduler.settle(back.domain, back.tokens)
        if i >= _GROUPS_PER_STEP * _WARM_STEPS:
            trained[back.domain] += back.tokens
    ratio = np.array([trained[n] for n in names])
    ratio = ratio / ratio.sum()
    return float(np.abs(ratio - weights / weights.sum()).sum())
