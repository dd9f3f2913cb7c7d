"""The scheduler against uniform picks on a synthetic learning model with traps and skewed costs."""

import math
import random

from burnish.schedule.domains import DomainScheduler
from burnish.schedule.picks import DomainScheduleConfig

GROUP = 8


class World:
    """Pass rates follow a saturating curve in gradient-carrying samples; some domains are traps."""

    def __init__(self, seed):
        self.rng = random.Random(seed)
        self.kind, self.need, self.cost, self.skill = {}, {}, {}, {}
        for i in range(12):
            name = f"domain{i}"
            self.kind[name] = ("learnable", "learnable", "noisy", "solved")[i % 4]
            self.need[name] = self.rng.uniform(150, 900)
            self.cost[name] = math.exp(self.rng.gauss(4.0, 0.8))
            self.skill[name] = self.need[name] * self.rng.uniform(0.15, 0.4)

    def pass_rate(self, name):
        if self.kind[name] == "noisy":
            return 0.5
        if self.kind[name] == "solved":
            return 0.995
        return 0.95 / (1.0 + (self.need[name] / self.skill[name]) ** 1.5)

    def train(self, name):
        p = self.pass_rate(name)
        passed = [self.rng.random() < p for _ in range(GROUP)]
        if 0 < sum(passed) < GROUP:
            self.skill[name] += GROUP * 4.0 * p * (1.0 - p)
        return sum(passed) / GROUP

    def mean_true_pass(self):
        names = [n for n, kind in self.kind.items() if kind == "learnable"]
        return sum(map(self.pass_rate, names)) / len(names)


def area_under_curve(seed, scheduled, budget=600_000.0):
    """Mean true pass rate of learnable domains over the budget, and the traps' part of the cost."""
    world = World(seed)
    names = list(world.kind)
    scheduler = DomainScheduler(names, DomainScheduleConfig())
    spent = area = trapped = 0.0
    turn = 0
    waits, longest = dict.fromkeys(names, 0), 0
    while spent < budget:
        name = scheduler.next().domain if scheduled else names[turn % len(names)]
        rate = world.train(name)
        cost = GROUP * world.cost[name]
        scheduler.observe(
            name,
            pass_rate=rate,
            mean_score=rate,
            num_rollouts=GROUP,
            cost_tokens=cost,
            step=turn // 8,
        )
        turn += 1
        spent += cost
        area += cost * world.mean_true_pass()
        trapped += cost * (world.kind[name] != "learnable")
        for n in names:
            waits[n] = 0 if n == name else waits[n] + 1
        longest = max(longest, *waits.values())
    if scheduled:
        assert longest <= scheduler.max_gap()
    return area / spent, trapped / spent


def test_value_per_cost_beats_uniform_and_avoids_traps():
    gains = []
    for seed in range(6):
        ours, our_traps = area_under_curve(seed, scheduled=True)
        uniform, uniform_traps = area_under_curve(seed, scheduled=False)
        gains.append(ours - uniform)
        assert our_traps < uniform_traps
    assert min(gains) > 0.0
    assert sum(gains) / len(gains) > 0.04
