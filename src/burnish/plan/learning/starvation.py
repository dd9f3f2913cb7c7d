"""Random use of the run's scheduler, watched for domains that wait beyond their bound."""

from __future__ import annotations

from random import Random

from burnish.schedule.domains import DomainScheduler
from burnish.schedule.picks import DomainScheduleConfig, DomainShare
from burnish.schedule.values.names import PolicyName

_NAMES = tuple(f"d{i}" for i in range(12))
# Steps under one configuration, before another one is drawn.
_STRETCH = 5000


def drive_randomly(num_steps: int, seed: int) -> int:
    """Violations of the bound in `num_steps` of deals, outages, costs and quarantines."""
    rng = Random(seed)
    violations = done = 0
    while done < num_steps:
        length = min(_STRETCH, num_steps - done)
        violations += _stretch(rng, length)
        done += length
    return violations


def _stretch(rng: Random, num_steps: int) -> int:
    names = _NAMES[: rng.randint(1, len(_NAMES))]
    shares = {n: DomainShare(weight=10.0 ** rng.uniform(-1, 1)) for n in names}
    config = DomainScheduleConfig(
        policy=rng.choice(list(PolicyName)), floor=rng.uniform(0.02, 1.0), domains=shares
    )
    scheduler = DomainScheduler(names, config)
    costs = {n: 10.0 ** rng.uniform(-3, 6) for n in names}
    waits, violations = dict.fromkeys(names, 0), 0
    bounds = {n: scheduler.max_gap(n) for n in names}
    for i in range(num_steps):
        blocked = {rng.choice(names)} if rng.random() < 0.3 else set()
        if rng.random() < 0.002 and len(scheduler.active()) > 1:
            scheduler.quarantine(rng.choice(scheduler.active()), "drawn")
        elif rng.random() < 0.004:
            back = rng.choice(names)
            scheduler.restore(back)
            waits[back] = 0
        eligible = [n for n in scheduler.active() if n not in blocked]
        pick = scheduler.next(blocked)
        if pick is None:
            continue
        for n in eligible:
            waits[n] = 0 if n == pick.domain else waits[n] + 1
            violations += waits[n] > bounds[n]
        if rng.random() < 0.7:
            rate = rng.random()
            cost = costs[pick.domain] * rng.uniform(0.1, 3.0)
            scheduler.observe(
                pick.domain,
                pass_rate=rate,
                mean_score=rate,
                num_rollouts=rng.choice((0, 8)),
                cost_tokens=cost,
                step=i // 16,
            )
        scheduler.settle(pick.domain, cost_of_training(rng))
    return violations


def cost_of_training(rng: Random) -> float:
    """Trained tokens of a group, of which half are dropped."""
    return 0.0 if rng.random() < 0.5 else rng.uniform(1.0, 1e4)
