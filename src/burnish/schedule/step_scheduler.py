"""A step's worth of decisions at once, over tiers: what the simulators drive.

The same tracks, policy, dealer and tiers as in the run; only the loop over single groups is gone.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from burnish.schedule.curriculum.group_size import GroupSizes
from burnish.schedule.curriculum.tiers import Tiers
from burnish.schedule.picks import DomainScheduleConfig
from burnish.schedule.track import Tracks
from burnish.schedule.values.base import NUM_BANDS, Policy, StepOutcome, Unit, View, band_of
from burnish.schedule.values.columns import Bools, Floats, Ints
from burnish.schedule.values.dealer import Dealer
from burnish.schedule.values.projection import normalised
from burnish.schedule.wishes import Wishes


class StepResult(NamedTuple):
    """What came of a step's groups."""

    attempted_DK: Floats
    """Rollouts started."""
    completed_DK: Floats
    """Of these, scored."""
    passed_DK: Floats
    """Of these, passed."""
    spread_D: Floats
    """Sum over groups of the spread of scores inside them, 0 (none) to 1 (half pass)."""
    cost_D: Floats
    """Cost of all attempts."""
    trained_tokens_D: Floats
    """Tokens that reached the loss."""
    alignment_D: Floats
    """Gradient alignment, if measured."""
    false_pass_D: Floats
    """What audits say now."""


class StepScheduler:
    """Plans rollouts per domain and tier."""

    def __init__(
        self,
        policy: Policy,
        wishes: Wishes,
        size_D: Floats,
        *,
        num_tiers: int,
        group_size: int,
        floor: float,
        guarded: bool,
        sizes: GroupSizes | None = None,
    ) -> None:
        """Nothing seen yet.

        Args:
            policy: the rule.
            wishes: declared shares above the floor.
            size_D: items of each domain.
            num_tiers: of difficulty.
            group_size: rollouts of one task.
            floor: part of the budget dealt in equal cost, if the policy protects one.
            guarded: whether nobody may wait beyond the deadline, and newcomers are tried first;
                baselines as published do neither.
            sizes: of groups by share, around `group_size`; all alike without.
        """
        num_rows = len(size_D)
        self.policy, self._wishes, self._size_D = policy, wishes, size_D
        self._group_size, self._guarded, self._sizes = group_size, guarded, sizes
        self._floor = floor if policy.protects else 0.0
        self._warmup_probes = DomainScheduleConfig().warmup_picks if guarded else 0
        self.tiers = Tiers(num_rows, num_tiers)
        self.tracks = Tracks(num_rows)
        self.dealer = Dealer(num_rows, policy.unit)
        self._step = 0
        self._charged_D = np.zeros(num_rows)
        self._num_by_share_D = np.zeros(num_rows)
        bands = [band_of(tier, num_tiers) for tier in range(num_tiers)]
        self._band_KB = np.eye(NUM_BANDS)[bands]
        self.size_D: Floats | None = None
        """Mean size of each domain's groups in the step that was planned last; None: all alike."""

    def plan(self, budget: float, eligible_D: Bools, rng: np.random.Generator) -> Floats:
        """Rollouts per domain and tier for about `budget` of cost."""
        tracks, tiers = self.tracks, self.tiers
        pass_DK = tiers.mean_DK()
        share_D = self.policy.decide(
            View(
                step=self._step,
                active_D=eligible_D,
                weight_D=self._wishes.weight_D,
                low_D=self._wishes.low_D,
                high_D=self._wishes.high_D,
                cost_D=tracks.cost_per_rollout(),
                learnability_D=tracks.learnability(),
                false_pass_D=tracks.rows["false_pass"],
                pass_DK=pass_DK,
                size_D=self._size_D,
            )
        )
        prices = tracks.prices()
        num_tiers = pass_DK.shape[1]
        # A probe spreads one group over all tiers: unbiased, and rehearsal of the easy ones.
        each = max(self._group_size // num_tiers, 1)
        probe_cost_D = prices.cost_D * each * num_tiers / self._group_size
        # As in the run: a domain is tried before its value counts.
        new_D = eligible_D & (tracks.rows["judged"] == 0.0)
        self.dealer.rows["floor"] += self._warmup_probes * probe_cost_D * new_D
        dealt = self.dealer.deal(
            budget,
            share_D,
            self._wishes.weight_D,
            eligible_D,
            prices,
            floor=self._floor,
            probe_cost_D=probe_cost_D,
            guarded=self._guarded,
        )
        self._charged_D = dealt.groups_D * self.dealer.price(prices)
        rollouts_DK = np.zeros_like(pass_DK)
        rows, tier_D = np.arange(len(share_D)), tiers.choose(rng)
        each_D = np.full(len(rows), float(self._group_size))
        if self._sizes is not None:
            each_D = _sized(self._sizes, dealt.groups_D, pass_DK[rows, tier_D], rng)
            self.size_D = np.where(each_D > 0.0, each_D, float(self._group_size))
        rollouts_DK[rows, tier_D] += np.rint(dealt.groups_D * each_D)
        rollouts_DK += (dealt.probes_D * each)[:, None]
        self._num_by_share_D = dealt.groups_D * each_D / self._group_size
        return rollouts_DK

    def observe(self, result: StepResult) -> None:
        """Learn from the step that was planned last."""
        self._step += 1
        tracks, size = self.tracks, self._group_size
        completed_D = result.completed_DK.sum(axis=1)
        judged_D = result.attempted_DK.sum(axis=1) / size
        tracks.judged_many(
            num_groups_D=judged_D,
            num_scored_D=completed_D,
            cost_D=result.cost_D,
            pass_rate_D=result.passed_DK.sum(axis=1) / np.maximum(completed_D, 1.0),
            spread_D=result.spread_D,
        )
        tracks.settled_many(judged_D, result.trained_tokens_D)
        tracks.rows["false_pass"] = result.false_pass_D
        self._correct(result, judged_D)
        self.tiers.observe(result.completed_DK, result.passed_DK)
        self.policy.observe(
            StepOutcome(
                attempted_DK=result.attempted_DK @ self._band_KB,
                completed_DK=result.completed_DK @ self._band_KB,
                passed_DK=result.passed_DK @ self._band_KB,
                groups_D=(result.completed_DK / size).sum(axis=1),
                spread_D=result.spread_D,
                cost_D=result.cost_D,
                alignment_D=result.alignment_D,
            )
        )

    def _correct(self, result: StepResult, judged_D: Floats) -> None:
        """Charge what the groups by share took beyond their price; probes are the floor's."""
        part_D = self._num_by_share_D / np.maximum(judged_D, 1e-9)
        if self.policy.unit is Unit.COST:
            self.dealer.correct(self._charged_D, result.cost_D * part_D)
        elif self.policy.unit is Unit.TOKENS:
            self.dealer.correct(self._charged_D, result.trained_tokens_D)

    def shares(self, eligible_D: Bools) -> Floats:
        """Declared ratios among those that can be served."""
        return normalised(self._wishes.weight_D, eligible_D)

    def state(self) -> dict[str, Any]:
        """All that `load` needs."""
        return {
            "step": self._step,
            "rule": self.policy.state(),
            "tiers": self.tiers.state(),
            "tracks": self.tracks.rows.state(),
            "dealer": self.dealer.state(),
            "sizes": self._sizes.state() if self._sizes is not None else None,
        }

    def load(self, state: dict[str, Any]) -> None:
        """Continue from between two steps."""
        self._step = int(state["step"])
        self.policy.load(state["rule"])
        self.tiers.load(state["tiers"])
        self.tracks.rows.load(state["tracks"])
        self.dealer.load(state["dealer"])
        if self._sizes is not None:
            self._sizes.load(state["sizes"])


def _sized(sizes: GroupSizes, groups_D: Floats, pass_D: Floats, rng: np.random.Generator) -> Floats:
    """Mean size of each domain's groups, 0 without any; they come in no order, as in the run."""
    num_D: Ints = groups_D.astype(np.int64)
    total_D = np.zeros(len(num_D))
    for row in rng.permutation(np.repeat(np.arange(len(num_D)), num_D)):
        total_D[row] += sizes.next(float(pass_D[row]))
    mean: Floats = total_D / np.maximum(num_D, 1)
    return mean
