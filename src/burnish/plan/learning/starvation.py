"""Random use of the run's scheduler, watched for domains that wait beyond their bound.

Domains join and leave, priorities change, some are quarantined and come back, machinery is out for
a while, costs differ a billionfold and half of what is sampled is dropped. The bound after a change
is the new one, or, for whoever was overdue by it, one turn of each other domain.
"""

from __future__ import annotations

from collections.abc import Collection
from random import Random

from burnish.schedule.domains import DomainScheduler
from burnish.schedule.picks import DomainScheduleConfig, DomainShare
from burnish.schedule.values.base import NUM_BANDS
from burnish.schedule.values.names import PolicyName

_MOST_DOMAINS = 12
# Steps under one configuration, before another one is drawn.
_STRETCH = 5000
_GROUPS_PER_STEP = 16
# Parts of the picks before which something changes, or an outage begins.
_CHANGE_RATIO = 0.01
_OUTAGE_RATIO = 0.002
_LONGEST_OUTAGE = 500


def drive_randomly(num_steps: int, seed: int) -> int:
    """Violations of the bound in `num_steps` picks."""
    rng = Random(seed)
    violations = done = 0
    while done < num_steps:
        length = min(_STRETCH, num_steps - done)
        violations += _stretch(rng, length)
        done += length
    return violations


class _Watch:
    """How long every domain has waited, and may."""

    def __init__(self, scheduler: DomainScheduler) -> None:
        self._scheduler = scheduler
        self._waits: dict[str, int] = {}
        self._limits: dict[str, int] = {}

    def changed(self, names: Collection[str], back: str | None = None) -> None:
        """Something about the domains is another now; `back` has no claims from before."""
        self._waits = {n: self._waits.get(n, 0) * (n != back) for n in names}
        turns = len(names) - 1
        self._limits = {
            n: max(self._scheduler.max_gap(n), w + turns) for n, w in self._waits.items()
        }

    def picked(self, domain: str, eligible: Collection[str]) -> int:
        """Domains that wait too long by now."""
        late = 0
        for name in eligible:
            self._waits[name] = 0 if name == domain else self._waits[name] + 1
            late += self._waits[name] > self._limits[name]
        # A limit that a change left behind holds for one wait.
        self._limits[domain] = self._scheduler.max_gap(domain)
        return late


def _stretch(rng: Random, num_steps: int) -> int:
    names = [f"d{i}" for i in range(rng.randint(1, _MOST_DOMAINS))]
    config = DomainScheduleConfig(
        policy=rng.choice(list(PolicyName)),
        floor=rng.uniform(0.02, 1.0),
        domains={n: _share(rng) for n in names},
    )
    scheduler = DomainScheduler(names, config)
    watch = _Watch(scheduler)
    watch.changed(names)
    down: dict[str, int] = {}
    violations = 0
    for i in range(num_steps):
        if rng.random() < _CHANGE_RATIO:
            watch.changed(names, _change(scheduler, names, rng, i))
        if rng.random() < _OUTAGE_RATIO:
            until = i + rng.randrange(_LONGEST_OUTAGE)
            down = {n: until for n in names if rng.random() < 0.5}
        blocked = {n for n, until in down.items() if i < until}
        blocked |= {rng.choice(names)} if rng.random() < 0.3 else set()
        pick = scheduler.next(blocked)
        if pick is None:
            continue
        eligible = [n for n in scheduler.active() if n not in blocked]
        violations += watch.picked(pick.domain, eligible)
        _answer(scheduler, pick.domain, rng, i)
    return violations


def _share(rng: Random) -> DomainShare:
    return DomainShare(weight=10.0 ** rng.uniform(-1, 1))


def _change(scheduler: DomainScheduler, names: list[str], rng: Random, step: int) -> str | None:
    """A domain joins, leaves, is weighed anew, goes to quarantine or comes back: that one."""
    what, name = rng.choice(("join", "leave", "weigh", "quarantine", "restore")), rng.choice(names)
    if what == "join" and len(names) < _MOST_DOMAINS:
        names.append(f"n{step}")
        scheduler.add(names[-1], _share(rng))
    elif what == "leave" and len(names) > 1:
        names.remove(name)
        scheduler.remove(name)
    elif what == "weigh":
        scheduler.declare(name, _share(rng))
    elif what == "quarantine" and len(scheduler.active()) > 1:
        scheduler.quarantine(name, "drawn")
    elif what == "restore":
        scheduler.restore(name)
        return name
    return None


def _answer(scheduler: DomainScheduler, domain: str, rng: Random, step: int) -> None:
    """The group comes back, or its failure does, or nothing."""
    if rng.random() < 0.7:
        rate = rng.random()
        # From its name, so that a domain stays as dear or cheap as it is.
        cost = 10.0 ** Random(domain).uniform(-3, 6) * rng.uniform(0.1, 3.0)
        scheduler.observe(
            domain,
            pass_rate=rate,
            mean_score=rate,
            num_rollouts=rng.choice((0, 8)),
            cost_tokens=cost,
            step=step // _GROUPS_PER_STEP,
            band=rng.randrange(NUM_BANDS),
        )
    scheduler.settle(domain, 0.0 if rng.random() < 0.5 else rng.uniform(1.0, 1e4))
