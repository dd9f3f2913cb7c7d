"""Domains that learn by a law: pass rates as sigmoids of the gradient-carrying samples so far.

    p(d, k) = g + (A - g) / (1 + (C_d 3**k / x_d) ** B)       (form of ScaleRL, arXiv 2510.13786)
    dx_d = sum_k scored rollouts * 4 p (1 - p) * P(group has variance)

plus transfer inside clusters, forgetting without rehearsal, and what a scenario family adds: traps,
prerequisites, rivals, outages, changes in time. The scheduler sees counts, costs and audits only.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import numpy as np

from burnish.schedule.step_scheduler import StepResult
from burnish.schedule.values.columns import Bools, Floats, Ints

GROUP_SIZE = 8
NUM_TIERS = 4
_TIER_RATIO = 3.0
_TRANSFER = 0.05
# Part of judged groups that is too old when its turn comes.
_STALE_RATIO = 0.03


class Kind(IntEnum):
    """What becomes of a domain under training."""

    LEARNABLE = 0
    """It follows its curve."""
    PLATEAUED = 1
    """Nearly at the end of its curve."""
    HARD = 2
    """Far from its beginning."""
    NOISY = 3
    """A coin: no training moves it."""
    FLAKY = 4
    """Learnable, but much of it fails."""
    HACKED = 5
    """Training finds a hole in the verifier: shown passes rise, true ones fall."""
    GAMING = 6
    """Shows progress in waves and makes none."""


TRAPS = (Kind.PLATEAUED, Kind.NOISY, Kind.HACKED, Kind.GAMING)


class Family(NamedTuple):
    """A scenario family: what kinds there are and what happens to them."""

    kinds: tuple[float, float, float, float, float, float, float]
    """Parts of the domains by kind."""
    cost_sigma: float = 1.1
    """Spread of the log of costs between domains."""
    cost_range: tuple[float, float] = (0.08, 30.0)
    """Bounds of costs, before they are scaled to a mean of 1."""
    cost_noise: float = 0.5
    """Coefficient of variation of one rollout's cost."""
    prerequisites: bool = False
    """A third of the domains learns only as two others are mastered."""
    rivals: float = 0.0
    """What a domain loses of what its rival cluster gains."""
    forgetting: float = 1.0
    """Times the usual forgetting."""
    changes: bool = False
    """Domains join, have their reward changed, and run out of data."""
    outages: bool = False
    """Crash bursts, a regional outage, slow nodes."""
    labelled: bool = True
    """Whether tasks say of which tier they are; else a domain draws them from all tiers alike."""


class Size(NamedTuple):
    """How large a simulated run is."""

    num_domains: int
    """D."""
    num_steps: int
    """T."""
    rollouts_per_domain: float
    """Budget of a step over D, in rollouts of mean cost."""
    num_accelerators: int
    """For the hours of the horizontal axis only: the budget is in accelerator-seconds."""


class World:
    """One draw of a family; `step` moves it."""

    def __init__(self, family: Family, size: Size, seed: int) -> None:
        """Draw domains; equal seeds give equal domains whatever the policy does later."""
        rng = np.random.default_rng((seed, 1))
        self.rng = np.random.default_rng((seed, 2))
        self.family, self.size, self.num = family, size, size.num_domains
        d = self.num
        self.kind: Ints = rng.choice(len(family.kinds), size=d, p=family.kinds)
        self.top = rng.uniform(0.55, 0.97, d)
        self.base = np.where(rng.random(d) < 0.3, rng.uniform(0.02, 0.25, d), 0.0)
        self.steep = rng.uniform(0.8, 2.2, d)
        # So that the budget reaches as far along the curves whatever the size of the run.
        reach = size.num_steps * size.rollouts_per_domain / 24_000.0
        self.need = np.exp(rng.normal(np.log(3000.0 * reach), 1.0, d))
        self.need[self.kind == Kind.HARD] *= 6.0
        self.skill = self.need * np.exp(rng.normal(-1.4, 0.5, d))
        self.skill[self.kind == Kind.PLATEAUED] = self.need[self.kind == Kind.PLATEAUED] * 200.0
        self.skill[self.kind == Kind.HARD] = self.need[self.kind == Kind.HARD] * 0.05
        self.start = self.skill.copy()
        cost = np.clip(np.exp(rng.normal(0.0, family.cost_sigma, d)), *family.cost_range)
        if family.cost_sigma == 0.0:
            low, high = np.log(family.cost_range)
            cost = np.exp(rng.uniform(low, high, d))
        self.cost = cost / cost.mean()
        self.items = np.exp(rng.normal(0.0, 1.2, d))
        self.tokens = np.exp(rng.normal(np.log(500.0), 0.7, d))
        flaky = self.kind == Kind.FLAKY
        self.failure = np.where(flaky, rng.uniform(0.3, 0.9, d), rng.uniform(0.0, 0.04, d))
        self.coin = rng.uniform(0.35, 0.65, d)
        self.cluster = rng.integers(0, max(d // 10, 1), d)
        self.rival = (self.cluster + 1) % max(d // 10, 1)
        self.gated = np.zeros(d, dtype=np.bool_)
        self.needs = rng.integers(0, d, (d, 2))
        if family.prerequisites:
            order = rng.permutation(d)
            self.gated[order[: d // 3]] = True
            self.needs = rng.choice(order[d // 3 :], (d, 2))
        self.fate = rng.random(d)
        self.limit = np.where(self.fate > 0.85, 0.3, np.inf) * self.need * 3.0
        self.forget = 2e-4 * family.forgetting * 1500.0 / size.num_steps
        self.trained = np.zeros(d)
        self.holes = np.zeros(d)
        self.time = 0
        self._need_DK = self.need[:, None] * _TIER_RATIO ** np.arange(NUM_TIERS)[None]
        self._moves = ~np.isin(self.kind, (Kind.NOISY, Kind.GAMING))
        self._hacked = self.kind == Kind.HACKED
        self._gaming = self.kind == Kind.GAMING
        befriended = self._mean_in(self.cluster, np.ones(d))
        self._transfer = befriended * 0.3 - 0.3 * (family.rivals > 0)
        self._flat = np.where(self._gaming, 0.15, self.coin)
        self._look()

    @property
    def num_tiers(self) -> int:
        """Tiers that a scheduler is told of."""
        return NUM_TIERS if self.family.labelled else 1

    def true_pass(self, skill: Floats | None = None) -> Floats:
        """What a perfect verifier would say, by tier."""
        if skill is None:
            return self._true_DK
        curve = 1.0 / (1.0 + (self._need_DK / skill[:, None]) ** self.steep[:, None])
        rate = self.base[:, None] + (self.top - self.base)[:, None] * curve
        rate = np.where(self._moves[:, None], rate, self._flat[:, None])
        true: Floats = rate * (1.0 - 0.8 * self.holes)[:, None]
        return true

    def shown_pass(self) -> Floats:
        """What the domain's own verifier says."""
        return self._shown_DK

    def _look(self) -> None:
        """Skills moved: what a verifier would say now is asked for several times a step."""
        self._true_DK = rate = self.true_pass(self.skill)
        shown = rate + (1.0 - rate) * self.holes[:, None]
        # A wave takes as long as an honest domain's rise, and is then over at once.
        wave = 0.15 + 0.6 * np.modf(self.trained / self.need * 0.7)[0]
        self._shown_DK: Floats = np.where(self._gaming[:, None], wave[:, None], shown)
        self._varied_DK = _varied(self._shown_DK)

    def score(self) -> float:
        """Mean true pass rate over domains and tiers."""
        return float(self.true_pass().mean())

    def active(self) -> Bools:
        """Domains that exist by now."""
        if not self.family.changes:
            return np.ones(self.num, dtype=np.bool_)
        return (self.fate > 0.2) | (self.time >= self.size.num_steps // 4)

    def audit(self) -> Floats:
        """Undeserved part of passes, known only once an audit has been made."""
        if self.time < self.audit_step:
            return np.zeros(self.num)
        shown = self.shown_pass().mean(axis=1)
        false: Floats = np.clip(1.0 - self.true_pass().mean(axis=1) / shown, 0.0, 1.0)
        return np.where(self._hacked, false, 0.0)

    @property
    def audit_step(self) -> int:
        """When audits begin."""
        return self.size.num_steps // 4

    def step(self, rollouts_DK: Floats, size_D: Floats | None = None) -> StepResult:
        """Sample, judge and train; groups of `GROUP_SIZE` unless their mean sizes are given."""
        self._change()
        rate_DK, failure = self._shown_DK, self._failures()
        if size_D is not None:
            self._varied_DK = _varied(rate_DK, size_D[:, None])
        attempted = np.rint(self._drawn(rollouts_DK, size_D)).astype(np.int64)
        done = self.rng.binomial(attempted, (1.0 - failure)[:, None])
        passed = self.rng.binomial(done, rate_DK)
        num = attempted.sum(axis=1)
        kept = done * self._varied_DK
        gained = self._learn(done)
        result = StepResult(
            attempted_DK=self._told(attempted),
            completed_DK=self._told(done),
            passed_DK=self._told(passed),
            spread_D=_spread(done, passed),
            cost_D=self._cost(num),
            trained_tokens_D=self._tokens(kept),
            alignment_D=self._alignment(gained),
            false_pass_D=self.audit(),
        )
        self.time += 1
        return result

    def _drawn(self, rollouts_DK: Floats, size_D: Floats | None) -> Floats:
        """Rollouts by true tier: a domain without labels draws each group's task from all alike."""
        if self.family.labelled:
            return rollouts_DK
        rollouts_D = rollouts_DK.sum(axis=1)
        size_D = np.full(self.num, float(GROUP_SIZE)) if size_D is None else size_D
        groups_D = np.rint(rollouts_D / size_D).astype(np.int64)
        drawn = self.rng.multinomial(groups_D, np.full(NUM_TIERS, 1.0 / NUM_TIERS))
        by_tier: Floats = drawn * (rollouts_D / np.maximum(groups_D, 1))[:, None]
        return by_tier

    def _told(self, num_DK: Ints) -> Floats:
        """What a scheduler gets to see of it."""
        told_DK = num_DK.astype(np.float64)
        return told_DK if self.family.labelled else told_DK.sum(axis=1, keepdims=True)

    def value(self) -> Floats:
        """True gain in score per unit of cost: what an oracle goes by."""
        ahead = 0.01 * self.need
        slope = (self.true_pass(self.skill + ahead) - self.true_pass()).mean(axis=1) / ahead
        by_tier = self._signal()
        # Who knows the tiers takes the one that teaches most.
        signal = by_tier.max(axis=1) if self.family.labelled else by_tier.mean(axis=1)
        signal = signal * self._rate() * (1.0 - self._failures())
        value: Floats = np.where(self._moves, slope * signal, 0.0) / self._costs()
        return value

    def _learn(self, done: Ints) -> Floats:
        """Move skills; returns what each domain earned by itself."""
        gain = (done * self._signal()).sum(axis=1) * self._rate()
        self.trained += done.sum(axis=1)
        self.holes = np.where(
            self._hacked, np.minimum(self.holes + gain / (2.0 * self.need), 0.9), self.holes
        )
        gain = np.where(self._moves, gain, 0.0)
        rehearsed = np.minimum(1.0, done.sum(axis=1) / 4.0)
        moved = self.skill + gain + _TRANSFER * self._mean_in(self.cluster, gain)
        if self.family.rivals:
            moved = moved - self.family.rivals * self._mean_in(self.rival, gain)
        kept = 1.0 - self.forget * (1.0 - 0.8 * rehearsed)
        self.skill = np.maximum(moved * kept, 0.02 * self.start)
        self._look()
        return gain

    def _mean_in(self, cluster: Ints, gain: Floats) -> Floats:
        """Mean gain in a cluster that each domain names, without the domain itself."""
        own = cluster == self.cluster
        total = np.bincount(self.cluster, gain, minlength=int(cluster.max()) + 1)[cluster]
        num = np.bincount(self.cluster, minlength=int(cluster.max()) + 1)[cluster] - own
        mean: Floats = (total - own * gain) / np.maximum(num, 1)
        return mean

    def _signal(self) -> Floats:
        rate = self._shown_DK
        signal: Floats = 4.0 * rate * (1.0 - rate) * self._varied_DK
        return signal

    def _rate(self) -> Floats:
        """How much of the signal is learned."""
        rate = np.ones(self.num)
        if self.family.prerequisites:
            ready = self.true_pass()[:, 0][self.needs].min(axis=1)
            rate = np.where(self.gated, np.clip((ready - 0.2) / 0.3, 0.02, 1.0), rate)
        if self.family.changes:
            rate = rate * (self.trained < self.limit)
        return rate

    def _change(self) -> None:
        if self.family.changes and self.time == self.size.num_steps // 2:
            changed = (self.fate > 0.2) & (self.fate < 0.35)
            self.skill = np.where(changed, self.start * 0.5, self.skill)
            self._look()

    def _failures(self) -> Floats:
        if not self.family.outages:
            return np.asarray(self.failure, dtype=np.float64)
        length, region = self.size.num_steps, self.fate
        failure = self.failure.copy()
        if length // 3 <= self.time < length // 3 + length // 20:
            failure[region < 0.3] = 1.0
        burst = (self.time // 7) % 10
        failure[(region * 10).astype(np.int64) == burst] += 0.4
        certain: Floats = np.minimum(failure, 1.0)
        return certain

    def _costs(self) -> Floats:
        if not self.family.outages:
            return np.asarray(self.cost, dtype=np.float64)
        slow = (self.fate > 0.8) & (self.time > self.size.num_steps // 2)
        slowed: Floats = np.where(slow, 3.0, 1.0) * self.cost
        return slowed

    def _cost(self, num: Ints) -> Floats:
        """A sum of costs with the right mean and spread."""
        spread = self.family.cost_noise / np.sqrt(np.maximum(num, 1))
        sigma = np.sqrt(np.log1p(spread**2))
        noise = np.exp(self.rng.normal(-0.5 * sigma**2, sigma))
        cost: Floats = self._costs() * num * noise
        return cost

    def _tokens(self, kept_DK: Floats) -> Floats:
        groups = self.rng.poisson(kept_DK.sum(axis=1) * (1.0 - _STALE_RATIO) / GROUP_SIZE)
        noise = 1.0 + 0.3 * self.rng.normal(size=self.num) / np.sqrt(np.maximum(groups, 1))
        tokens: Floats = groups * GROUP_SIZE * self.tokens * np.maximum(noise, 0.0)
        return tokens

    def _alignment(self, gain: Floats) -> Floats:
        """True cosines of clusters, measured with noise."""
        alignment: Floats = np.clip(self._transfer + self.rng.normal(0.0, 0.2, self.num), -1.0, 1.0)
        return np.where(gain > 0, alignment, 0.0)


def _varied(rate: Floats, size: Floats | int = GROUP_SIZE) -> Floats:
    """Chance that a group has both passes and failures."""
    varied: Floats = 1.0 - rate**size - (1.0 - rate) ** size
    return varied


def _spread(done_DK: Ints, passed_DK: Ints) -> Floats:
    """Sum over groups of the spread of their scores; those of a tier count as alike."""
    rate_DK = passed_DK / np.maximum(done_DK, 1.0)
    spread_DK = 2.0 * np.sqrt(rate_DK * (1.0 - rate_DK))
    spread: Floats = (spread_DK * (done_DK / GROUP_SIZE)).sum(axis=1)
    return spread
