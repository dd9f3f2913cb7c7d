"""The families of learning scenarios, and a trial on one of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from burnish.core.errors import UserError
from burnish.plan.learning.measures import Measures
from burnish.plan.learning.world import GROUP_SIZE, Family, Size, World
from burnish.plan.scenario import Tier, Trial
from burnish.schedule.curriculum.group_size import GroupSizes
from burnish.schedule.picks import DomainScheduleConfig
from burnish.schedule.step_scheduler import StepScheduler
from burnish.schedule.values.base import Policy, Unit, View
from burnish.schedule.values.columns import Floats
from burnish.schedule.values.fixed import Rule
from burnish.schedule.values.names import PolicyName
from burnish.schedule.values.registry import make_policy
from burnish.schedule.values.vpcf import ValuePerCost
from burnish.schedule.wishes import Wishes

ORACLE = "oracle"
FAIR = "value_fair"
"""`value` with half the fairness knob."""
SIZED = "value_sized"
"""`value` with groups of half to twice the usual size (`schedule.curriculum.size_ratio` of 2)."""
POLICIES = (*(name.value for name in PolicyName), FAIR, SIZED, ORACLE)
_SIZE_RATIO = 2.0
UNTIERED = "untiered"
"""The family whose tasks do not say how difficult they are."""

SIZES = {
    Tier.S: Size(50, 300, 24.0, 64),
    Tier.M: Size(300, 1000, 16.0, 1024),
    Tier.L: Size(1000, 2000, 16.0, 8192),
}

# Parts: learnable, plateaued, hard, noisy, flaky, hacked, gaming.
_PLAIN = (0.70, 0.15, 0.15, 0.0, 0.0, 0.0, 0.0)
FAMILIES: Mapping[str, tuple[str, Family]] = {
    "clean": ("Honest domains of unequal cost, some plateaued, some hard.", Family(_PLAIN)),
    "traps": (
        "Coins, plateaus, and verifiers with a hole.",
        Family((0.45, 0.15, 0.15, 0.15, 0.0, 0.10, 0.0)),
    ),
    "cost_skew": (
        "Costs from 1 to 400, evenly on a logarithmic scale.",
        Family(_PLAIN, cost_sigma=0.0, cost_range=(1.0, 400.0)),
    ),
    "prerequisites": (
        "A third of the domains needs two others first.",
        Family(_PLAIN, prerequisites=True),
    ),
    "interference": (
        "Clusters unlearn what their rivals learn; much is forgotten.",
        Family(_PLAIN, rivals=0.1, forgetting=5.0),
    ),
    "non_stationary": (
        "Domains join, change their reward, and run out of data.",
        Family(_PLAIN, changes=True),
    ),
    "outages": (
        "Flaky machinery, crash bursts, a regional outage, slow nodes.",
        Family((0.60, 0.12, 0.13, 0.05, 0.10, 0.0, 0.0), outages=True),
    ),
    "heavy_tail": (
        "One rollout's cost varies by seven times its mean.",
        Family(_PLAIN, cost_noise=7.0),
    ),
    "gaming": (
        "Domains that show progress in waves and make none.",
        Family((0.55, 0.12, 0.13, 0.05, 0.0, 0.0, 0.15)),
    ),
    UNTIERED: (
        "Tasks from easy to hard that do not say which they are; coins and plateaus among them.",
        Family((0.60, 0.15, 0.15, 0.10, 0.0, 0.0, 0.0), labelled=False),
    ),
}

# A domain most of whose rollouts fail is left alone for so many steps. It stands in for the
# breakers, which are another simulator's subject, and does the same for every policy.
_PAUSE_STEPS = 20


class Oracle(Rule):
    """Knows what every domain would gain per unit of cost."""

    unit = Unit.COST

    def __init__(self, num_rows: int, value: Callable[[], Floats]) -> None:
        """Ask `value` at each step."""
        super().__init__(num_rows)
        self._value = value

    def scores(self, view: View) -> Floats:
        """The cube: nearly all on the best, without starving what comes close."""
        value = self._value()
        scores: Floats = (value / max(float(value.max()), 1e-300)) ** 3
        return scores


class LearningScenario:
    """One family."""

    def __init__(self, name: str, summary: str, family: Family) -> None:
        """Name it."""
        self.name, self.summary, self.family = name, summary, family

    def policies(self) -> tuple[str, ...]:
        """Every rule, and the oracle."""
        return POLICIES

    def run(self, policy: str, tier: Tier, seed: int) -> Trial:
        """Simulate a whole run under `policy`."""
        size = SIZES[tier]
        world = World(self.family, size, seed)
        return simulate(world, scheduler_for(policy, world), seed)


def scheduler_for(policy: str, world: World) -> StepScheduler:
    """The scheduler of the real run around a policy, without guard for the published baselines.

    Raises:
        UserError: if there is no such policy.
    """
    num = world.num
    rule: Policy
    if policy == ORACLE:
        rule = Oracle(num, world.value)
    elif policy == FAIR:
        rule = ValuePerCost(num, fairness=0.5)
    elif policy == SIZED:
        rule = ValuePerCost(num)
    elif policy in list(PolicyName):
        rule = make_policy(PolicyName(policy), num)
    else:
        known = ", ".join(POLICIES)
        raise UserError(f"There is no policy {policy!r}.", fix=f"use one of {known}.")
    wishes = Wishes(np.ones(num), np.zeros(num), np.ones(num))
    window = int(world.size.rollouts_per_domain * num) // GROUP_SIZE
    return StepScheduler(
        rule,
        wishes,
        world.items,
        num_tiers=world.num_tiers,
        group_size=GROUP_SIZE,
        floor=DomainScheduleConfig().floor,
        guarded=rule.protects,
        sizes=GroupSizes(GROUP_SIZE, _SIZE_RATIO, window) if policy == SIZED else None,
    )


def simulate(world: World, scheduler: StepScheduler, seed: int) -> Trial:
    """Drive `scheduler` through all steps of `world`."""
    rng = np.random.default_rng((seed, 3))
    budget = world.size.rollouts_per_domain * world.num
    measures = Measures(world)
    failing, paused = np.zeros(world.num), np.zeros(world.num)
    while world.time < world.size.num_steps:
        eligible = world.active() & (paused <= world.time)
        rollouts_DK = scheduler.plan(budget, eligible, rng)
        measures.planned(eligible, rollouts_DK)
        result = world.step(rollouts_DK, scheduler.size_D)
        scheduler.observe(result)
        measures.stepped(result)
        tried = result.attempted_DK.sum(axis=1)
        lost = 1.0 - result.completed_DK.sum(axis=1) / np.maximum(tried, 1.0)
        failing = np.where(tried > 0, 0.8 * failing + 0.2 * lost, failing)
        trips = failing > 0.5
        paused = np.where(trips, world.time + _PAUSE_STEPS, paused)
        failing = np.where(trips, 0.3, failing)
    return measures.trial()


SCENARIOS = tuple(LearningScenario(name, *about) for name, about in FAMILIES.items())
