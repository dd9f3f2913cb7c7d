"""Which domain gets the next group: value per cost with a protected floor (VPC-F).

    observe(domain, pass rate, cost) --> slope, learnability, cost --> value --> shares
                                                                                  |
    next() <-- overdue? <-- warm-up? <-- floor's turn? <-- otherwise by value <---'

Most of the budget follows the expected gain in pass rate per unit of cost (optimistic, so that the
unknown is tried). A fixed part, the floor, is dealt round-robin in equal cost: it keeps every
domain from starving, probes those that look saturated or hopeless, and rehearses what was learned.

Starvation bound: a domain that has waited `deadline = ceil(2 * D / floor)` picks is served before
anything else, longest wait first. Once served it is not overdue again for `deadline >= D` picks, so
at most D - 1 others can come before it: no eligible domain ever waits more than deadline + D - 1.

No randomness: the same calls in the same order give the same decisions.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from burnish.core.errors import UserError
from burnish.schedule.picks import (
    CostUnit,
    DomainRow,
    DomainScheduleConfig,
    DomainShare,
    Pick,
    PickReason,
)
from burnish.schedule.shares import DeficitCounters, bounded_shares
from burnish.schedule.slope import SlopeEstimate, shrink
from burnish.schedule.state_version import require_version
from burnish.schedule.track import DomainTrack

STATE_VERSION = 1

# Optimism in posterior standard deviations: 1.5 was best of {0, 0.5, 1.5} in simulation, and flat.
_OPTIMISM = 1.5
# Shares go with value**1.5: sharper than proportional, still spread when values are close.
_SHARPNESS = 1.5
# Part of the way to the new target that shares move per training step: a noisy step cannot swing
# the mix of a batch.
_SHARE_SMOOTHING = 0.25
# Costs below a billionth of a second or token count as unknown.
_MIN_COST = 1e-9
# The overdue guard waits for twice what a floor that is fair in picks would need, so equal cost
# rules until costs differ by more than that.
_DEADLINE_FACTOR = 2.0


class DomainScheduler:
    """Chooses domains; see the module text for the rule and its bound."""

    def __init__(self, domains: Sequence[str], config: DomainScheduleConfig) -> None:
        """Start with all `domains` active.

        Raises:
            UserError: if there are none, or their configured shares cannot be met together.
        """
        check_schedule(domains, config)
        self._config = config
        self._domains = {name: DomainTrack() for name in domains}
        self._floor = DeficitCounters(domains)
        self._value = DeficitCounters(domains)
        self._floor_due = 0.0
        self._step = -1

    def max_gap(self) -> int:
        """Most picks that an eligible domain can wait between two of its own."""
        return self._deadline() + len(self._domains) - 1

    def active(self) -> tuple[str, ...]:
        """Domains that are not in quarantine."""
        return tuple(n for n, d in self._domains.items() if d.quarantined is None)

    def next(self, blocked: Collection[str] = ()) -> Pick | None:
        """Choose the next group; None if no domain is eligible.

        Args:
            blocked: domains to pass over this time, such as those with an open breaker. Their wait
                stands still meanwhile.
        """
        eligible = [n for n in self.active() if n not in blocked]
        if not eligible:
            return None
        costs = self._group_costs()
        floor = {n: self._wish(n).weight for n in eligible}
        name, reason = self._choose(eligible, floor, costs)
        self._floor_due += self._config.floor * costs[name]
        if reason is PickReason.FLOOR:
            self._floor_due -= costs[name]
            self._domains[name].num_floor_picks += 1
        for other in eligible:
            self._domains[other].wait_picks += 1
        chosen = self._domains[name]
        chosen.wait_picks = 0
        index = chosen.next_index
        chosen.next_index += 1
        return Pick(domain=name, index=index, reason=reason)

    def observe(
        self,
        domain: str,
        *,
        pass_rate: float,
        mean_score: float,
        num_rollouts: int,
        step: int,
        cost_s: float | None = None,
        cost_tokens: float | None = None,
        score_std: float | None = None,
    ) -> None:
        """Learn from one judged group.

        Args:
            domain: where it came from.
            pass_rate: passed over scored rollouts.
            mean_score: mean over scored rollouts.
            num_rollouts: scored rollouts, at least 1. Groups without any say nothing: omit them.
            step: training step at which it is observed; shares move when it changes.
            cost_s: accelerator-seconds of the whole group.
            cost_tokens: tokens computed for the whole group.
            score_std: population standard deviation of scores inside the group; by default that
                of pass/fail. Zero means that the group carries no gradient.
        """
        cost = cost_s if self._config.cost_unit is CostUnit.SECONDS else cost_tokens
        assert cost is not None, f"cost in {self._config.cost_unit} is required"
        assert num_rollouts >= 1
        assert 0.0 <= pass_rate <= 1.0
        assert math.isfinite(cost)
        assert math.isfinite(mean_score)
        assert cost >= 0.0
        std = math.sqrt(pass_rate * (1.0 - pass_rate)) if score_std is None else score_std
        self._domains[domain].add(
            pass_rate=pass_rate,
            mean_score=mean_score,
            score_std=std,
            num_rollouts=num_rollouts,
            cost=cost,
        )
        if step != self._step:
            self._step = step
            self._move_shares()

    def quarantine(self, domain: str, reason: str) -> None:
        """Stop picking `domain` from the next call on."""
        self._domains[domain].quarantined = reason

    def restore(self, domain: str) -> None:
        """Make `domain` eligible again, without claims from its absence."""
        d = self._domains[domain]
        d.quarantined = None
        d.wait_picks = 0
        self._floor.forget(domain)
        self._value.forget(domain)

    def table(self) -> tuple[DomainRow, ...]:
        """The scheduler's view of every domain, for reports."""
        active = self.active()
        shares = self._target_shares(active) if active else {}
        slopes, values = self._slopes(), self._values()
        best = max((values[n] for n in active), default=0.0) or 1.0
        total_cost = sum(d.total_cost for d in self._domains.values()) or 1.0
        costs = self._rollout_costs()
        floor, weights = self._config.floor, {n: self._wish(n).weight for n in active}
        return tuple(
            DomainRow(
                domain=n,
                quarantined=d.quarantined,
                share=(1 - floor) * shares[n] + floor * weights[n] / sum(weights.values())
                if n in shares
                else 0.0,
                cost_ratio=d.total_cost / total_cost,
                pass_rate=d.passed / d.groups if d.groups else None,
                mean_score=d.score / d.groups if d.groups else None,
                learnability=d.learnability(),
                slope=slopes[n].mean,
                value=values[n] / best,
                cost_per_rollout=costs[n],
                num_picks=d.next_index,
                num_floor_picks=d.num_floor_picks,
                wait_picks=d.wait_picks,
            )
            for n, d in self._domains.items()
        )

    def state(self) -> dict[str, Any]:
        """All that `from_state` needs, as JSON values."""
        return {
            "version": STATE_VERSION,
            "domains": {name: d.state() for name, d in self._domains.items()},
            "floor": self._floor.state(),
            "value": self._value.state(),
            "floor_due": self._floor_due,
            "step": self._step,
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any], config: DomainScheduleConfig) -> DomainScheduler:
        """Continue exactly where `state` was taken.

        Raises:
            UserError: if another version of the program wrote it.
        """
        require_version(state, STATE_VERSION, "scheduler state")
        scheduler = cls(tuple(state["domains"]), config)
        scheduler._domains = {n: DomainTrack.from_state(s) for n, s in state["domains"].items()}
        scheduler._floor = DeficitCounters.from_state(state["floor"])
        scheduler._value = DeficitCounters.from_state(state["value"])
        scheduler._floor_due = float(state["floor_due"])
        scheduler._step = int(state["step"])
        return scheduler

    def _deadline(self) -> int:
        return math.ceil(_DEADLINE_FACTOR * len(self._domains) / self._config.floor)

    def _choose(
        self, eligible: Sequence[str], floor: Mapping[str, float], costs: Mapping[str, float]
    ) -> tuple[str, PickReason]:
        longest = max(eligible, key=lambda n: self._domains[n].wait_picks)
        if self._domains[longest].wait_picks >= self._deadline():
            self._floor.charge(longest, floor, costs[longest])
            return longest, PickReason.FLOOR
        newest = min(eligible, key=lambda n: self._domains[n].next_index)
        if self._domains[newest].next_index < self._config.warmup_picks:
            return newest, PickReason.WARMUP
        if self._floor_due >= 0.0:
            return self._floor.serve(floor, costs), PickReason.FLOOR
        return self._value.serve(self._current_shares(eligible), costs), PickReason.VALUE

    def _current_shares(self, eligible: Sequence[str]) -> dict[str, float]:
        """Smoothed value shares; before the first observation, and for newcomers, the target."""
        target: dict[str, float] = {}
        if any(self._domains[n].smoothed_share is None for n in eligible):
            target = self._target_shares(eligible)
        shares = {}
        for n in eligible:
            smoothed = self._domains[n].smoothed_share
            shares[n] = target[n] if smoothed is None else smoothed
        return shares

    def _move_shares(self) -> None:
        active = self.active()
        if not active:
            return
        target = self._target_shares(active)
        for n, before in self._current_shares(active).items():
            self._domains[n].smoothed_share = before + _SHARE_SMOOTHING * (target[n] - before)

    def _target_shares(self, names: Sequence[str]) -> dict[str, float]:
        """Shares of what lies above the floor."""
        floor = self._config.floor
        if floor >= 1.0:
            return {n: 1.0 / len(names) for n in names}
        values = self._values()
        best = max(values[n] for n in names)
        weight = sum(self._wish(n).weight for n in names)
        low, high = [], []
        for n in names:
            wish = self._wish(n)
            protected = floor * wish.weight / weight
            low.append(max(wish.min_share - protected, 0.0) / (1.0 - floor))
            high.append(min(max(wish.max_share - protected, 0.0) / (1.0 - floor), 1.0))
        sharpened = [(values[n] / best) ** _SHARPNESS if best > 0.0 else 1.0 for n in names]
        return dict(zip(names, bounded_shares(sharpened, low, high), strict=True))

    def _slopes(self) -> dict[str, SlopeEstimate]:
        estimates = [d.line.estimate() for d in self._domains.values()]
        return dict(zip(self._domains, shrink(estimates), strict=True))

    def _values(self) -> dict[str, float]:
        costs = self._rollout_costs()
        return {
            n: max(slope.mean + _OPTIMISM * slope.sd, 0.0)
            * self._domains[n].learnability()
            * self._wish(n).weight
            / costs[n]
            for n, slope in self._slopes().items()
        }

    def _rollout_costs(self) -> dict[str, float]:
        """Recent cost per rollout; the mean of the others where nothing was observed."""
        return self._means_or_typical({n: (d.cost, d.rollouts) for n, d in self._domains.items()})

    def _group_costs(self) -> dict[str, float]:
        """Recent cost per group; the mean of the others where nothing was observed."""
        return self._means_or_typical({n: (d.cost, d.groups) for n, d in self._domains.items()})

    @staticmethod
    def _means_or_typical(sums: Mapping[str, tuple[float, float]]) -> dict[str, float]:
        # A cost of (almost) nothing is a rollout that never sampled, not a bargain.
        means = {n: t / count for n, (t, count) in sums.items() if t > _MIN_COST * count}
        typical = sum(means.values()) / len(means) if means else 1.0
        return {n: means.get(n, typical) for n in sums}

    def _wish(self, name: str) -> DomainShare:
        return self._config.domains.get(name, _DEFAULT_WISH)


_DEFAULT_WISH = DomainShare()


def check_schedule(domains: Sequence[str], config: DomainScheduleConfig) -> None:
    """Refuse a mix that no scheduler can serve; for dry runs, before anything is loaded.

    Raises:
        UserError: no domain, wishes for a domain that is not trained, or shares that cannot be
            met together.
    """
    if not domains:
        raise UserError("No domain to schedule.", fix="name at least one under `envs`.")
    assert len(set(domains)) == len(domains), "duplicate domain"
    unknown = sorted(set(config.domains) - set(domains))
    if unknown:
        raise UserError(
            f"schedule.domains names {unknown[0]!r}, which this run does not train.",
            fix=f"use one of {', '.join(sorted(domains))}.",
        )
    wishes = {n: config.domains.get(n, _DEFAULT_WISH) for n in domains}
    least = sum(w.min_share for w in wishes.values())
    if least > 1.0 + 1e-9:
        raise UserError(
            f"The min_share values under schedule.domains sum to {least:g}.",
            fix="lower them until they sum to at most 1.",
        )
    if sum(w.max_share for w in wishes.values()) < 1.0 - 1e-9:
        raise UserError(
            "The max_share values under schedule.domains sum to less than 1.",
            fix="raise one of them, or remove it.",
        )
    total = sum(w.weight for w in wishes.values())
    for name, wish in wishes.items():
        protected = config.floor * wish.weight / total
        if wish.max_share < max(wish.min_share, protected):
            raise UserError(
                f"schedule.domains.{name}.max_share = {wish.max_share:g} lies below its min_share "
                f"or its protected floor of {protected:g}.",
                fix="raise max_share, or lower schedule.floor.",
            )
