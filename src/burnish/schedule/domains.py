r"""Which domain gets the next group: a policy's shares, dealt above a protected floor.

    observe(domain, pass rate, cost) --> tracks --+--> policy --> shares
    settle(domain, trained tokens) --> accounts   |                 |
                                          \       v                 v
    next() <-- overdue? <-- warm-up? <-- floor's turn? <-- otherwise by share

Most of the budget follows the policy (`values/`; by default the expected gain in pass rate per unit
of cost). A fixed part, the floor, is dealt round-robin in equal cost: it keeps every domain from
starving, probes those that look saturated or hopeless, and rehearses what was learned. Overdue
domains come first whatever the policy says: `values/dealer.py` has the bound and why it holds.

No randomness: the same calls in the same order give the same decisions.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from burnish.schedule.explanation import explanation
from burnish.schedule.picks import (
    DomainRow,
    DomainScheduleConfig,
    DomainShare,
    Explanation,
    Pick,
    PickReason,
)
from burnish.schedule.state_version import require_version
from burnish.schedule.step_window import StepWindow
from burnish.schedule.track import Tracks
from burnish.schedule.values.base import Policy, Unit, View
from burnish.schedule.values.columns import Bools, Floats
from burnish.schedule.values.dealer import Dealer, Prices
from burnish.schedule.values.registry import make_policy
from burnish.schedule.wishes import (
    NO_WISH,
    Wishes,
    check_schedule,
    check_wishes,
    wishes_above_floor,
)

STATE_VERSION = 3


class DomainScheduler:
    """Chooses domains; see the module text for the rule and its bound."""

    def __init__(self, domains: Sequence[str], config: DomainScheduleConfig) -> None:
        """Start with all `domains` active.

        Raises:
            UserError: if there are none, or their configured shares cannot be met together.
        """
        check_schedule(domains, config)
        self._config = config
        self._names = list(domains)
        self._row = {name: row for row, name in enumerate(domains)}
        self._shares = {n: config.domains.get(n, NO_WISH) for n in domains}
        self._quarantined: dict[str, str] = {}
        self._policy: Policy = make_policy(config.policy, len(domains), fairness=config.fairness)
        self._tracks = Tracks(len(domains))
        self._window = StepWindow(len(domains))
        self._dealer = Dealer(len(domains), self._policy.unit)
        self._step = -1
        self._prices: Prices | None = None
        self._roster_changed()
        self._decide()

    def max_gap(self, domain: str | None = None) -> int:
        """Most picks that an eligible domain can wait between two of its own; the worst if None."""
        deadline = self._deadlines.max() if domain is None else self._deadlines[self._row[domain]]
        return int(deadline) + len(self._names) - 1

    @property
    def policy(self) -> str:
        """Name of the rule."""
        return self._config.policy.value

    def active(self) -> tuple[str, ...]:
        """Domains that are not in quarantine."""
        return self._active_names

    def next(self, blocked: Collection[str] = ()) -> Pick | None:
        """Choose the next group; None if no domain is eligible.

        Args:
            blocked: domains to pass over this time, such as those with an open breaker. Their wait
                stands still meanwhile.
        """
        eligible = self._active
        if blocked:
            eligible = eligible.copy()
            eligible[[self._row[n] for n in blocked if n in self._row]] = False
        if not eligible.any():
            return None
        row, reason = self._choose(eligible)
        dealer, prices = self._dealer, self._current_prices()
        cost = float(prices.cost_D[row])
        if self._policy.protects:
            dealer.floor_due += self._config.floor * cost
        if reason is PickReason.FLOOR:
            dealer.floor_due = max(dealer.floor_due - cost, -cost)
            dealer.charge_floor(row, self._wishes.weight_D, eligible, cost)
            self._tracks.rows["num_floor_picks"][row] += 1.0
        if reason is PickReason.VALUE or not self._policy.protects:
            price = float(dealer.price(prices)[row])
            dealer.charge(row, self._share_D, eligible, price)
        dealer.waited(eligible, row)
        index = int(self._tracks.rows["next_index"][row])
        self._tracks.rows["next_index"][row] += 1.0
        return Pick(domain=self._names[row], index=index, reason=reason)

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
        cost_dominant: float | None = None,
        score_std: float | None = None,
        band: int = 0,
        rehearsed: bool = False,
    ) -> None:
        """Learn from one judged group.

        Args:
            domain: where it came from; one that was removed meanwhile is ignored.
            pass_rate: passed over scored rollouts.
            mean_score: mean over scored rollouts.
            num_rollouts: scored rollouts; 0 for a group that failed, which only cost something.
            step: training step at which it is observed; shares move when it changes.
            cost_s: accelerator-seconds of the whole group.
            cost_tokens: tokens computed for the whole group.
            cost_dominant: seconds of the resource that the group used the greatest part of.
            score_std: population standard deviation of scores inside the group; by default that
                of pass/fail. Zero means that the group carries no gradient.
            band: of difficulty (`values.base.band_of`), where items are chosen by how they go.
            rehearsed: the item was chosen because it passes; it tells nothing but what it cost.
        """
        cost = self._config.cost_unit.of(seconds=cost_s, dominant=cost_dominant, tokens=cost_tokens)
        assert num_rollouts >= 0
        assert 0.0 <= pass_rate <= 1.0
        assert math.isfinite(mean_score)
        std = math.sqrt(pass_rate * (1.0 - pass_rate)) if score_std is None else score_std
        # The spread of a fair coin, 0.5, is the most that scores in [0, 1] can have.
        spread = min(2.0 * std, 1.0)
        row = self._row.get(domain)
        if row is None:
            return
        self._tracks.judged(
            row,
            num_scored=num_rollouts,
            cost=cost,
            pass_rate=pass_rate,
            mean_score=mean_score,
            spread=spread,
            rehearsed=rehearsed,
        )
        self._prices = None
        self._dealer.settle(row, Unit.COST, cost, self._share_D, self._active)
        self._window.judged(
            row,
            band=band,
            num_scored=0 if rehearsed else num_rollouts,
            pass_rate=pass_rate,
            spread=spread,
            cost=cost,
        )
        if step != self._step:
            self._step = step
            self._policy.observe(self._window.take())
            self._decide()

    def settle(self, domain: str, trained_tokens: float) -> None:
        """A group of `domain` was trained, or dropped with 0 tokens."""
        row = self._row.get(domain)
        if row is None:
            return
        self._tracks.settled(row, trained_tokens)
        self._prices = None
        self._dealer.settle(row, Unit.TOKENS, trained_tokens, self._share_D, self._active)

    def cancelled(self, domain: str) -> None:
        """A group of `domain` was given up before it was judged: its charge is returned at once."""
        row = self._row.get(domain)
        if row is not None:
            self._dealer.settle(row, self._policy.unit, 0.0, self._share_D, self._active)

    def audited(self, domain: str, false_pass_ratio: float) -> None:
        """An audit found that this part of the passes of `domain` is undeserved."""
        assert 0.0 <= false_pass_ratio <= 1.0
        self._tracks.rows["false_pass"][self._row[domain]] = false_pass_ratio

    def quarantine(self, domain: str, reason: str) -> None:
        """Stop picking `domain` from the next call on."""
        self._quarantined[domain] = reason
        self._roster_changed()

    def restore(self, domain: str) -> None:
        """Make `domain` eligible again, without claims from its absence."""
        self._quarantined.pop(domain, None)
        self._dealer.forget(self._row[domain])
        self._roster_changed()

    def add(self, domain: str, share: DomainShare = NO_WISH) -> None:
        """Train `domain` as well, from the next call on.

        Raises:
            UserError: if its share cannot be met beside the others.
        """
        assert domain not in self._row, f"{domain} is there already"
        check_wishes({**self._shares, domain: share}, self._config.floor)
        self._shares[domain] = share
        self._names.append(domain)
        for part in (self._policy, self._tracks.rows, self._window, self._dealer.rows):
            part.add_row()
        self._roster_changed()
        self._decide()

    def remove(self, domain: str) -> None:
        """Forget `domain`; what is in flight of it may still be settled, and is ignored."""
        assert len(self._names) > 1, "the last domain"
        row = self._row[domain]
        del self._shares[domain], self._names[row]
        self._quarantined.pop(domain, None)
        for part in (self._policy, self._tracks.rows, self._window, self._dealer.rows):
            part.remove_row(row)
        self._roster_changed()
        self._decide()

    def declare(self, domain: str, share: DomainShare) -> None:
        """Change the priority and bounds of `domain`; shares move from the next step on.

        Raises:
            UserError: if they cannot be met beside the others.
        """
        assert domain in self._row
        check_wishes({**self._shares, domain: share}, self._config.floor)
        self._shares[domain] = share
        self._roster_changed()

    def explain(self, domain: str) -> Explanation:
        """Why `domain` has its share."""
        row = self._row[domain]
        return explanation(
            domain,
            policy=self._config.policy,
            unit=self._policy.unit,
            shares=self._budget_shares(row),
            max_gap_picks=self.max_gap(domain),
            terms=self._policy.explain(row),
            wish=self._shares[domain],
            quarantined=self._quarantined.get(domain),
        )

    def table(self) -> tuple[DomainRow, ...]:
        """The scheduler's view of every domain, for reports."""
        tracks, rows = self._tracks, self._tracks.rows
        terms = [self._policy.explain(row) for row in range(len(self._names))]
        values = [t.get("value", 0.0) * self._active[row] for row, t in enumerate(terms)]
        best = max(values) or 1.0
        learnability, cost = tracks.learnability(), tracks.cost_per_rollout()
        total_cost = float(rows["total_cost"].sum()) or 1.0
        return tuple(
            DomainRow(
                domain=n,
                quarantined=self._quarantined.get(n),
                share=self._budget_shares(row)[0],
                cost_ratio=float(rows["total_cost"][row]) / total_cost,
                pass_rate=tracks.mean(row, "passed"),
                mean_score=tracks.mean(row, "score"),
                learnability=float(learnability[row]),
                slope=terms[row].get("slope", 0.0),
                value=terms[row].get("value", 0.0) / best,
                cost_per_rollout=float(cost[row]),
                num_picks=int(rows["next_index"][row]),
                num_floor_picks=int(rows["num_floor_picks"][row]),
                wait_picks=int(self._dealer.rows["wait"][row]),
                max_gap_picks=self.max_gap(n),
                trained_tokens=float(rows["trained_tokens"][row]),
            )
            for row, n in enumerate(self._names)
        )

    def state(self) -> dict[str, Any]:
        """All that `from_state` needs, as JSON values."""
        return {
            "version": STATE_VERSION,
            "policy": self._config.policy.value,
            "domains": self._names.copy(),
            "shares": {n: share.model_dump() for n, share in self._shares.items()},
            "quarantined": dict(self._quarantined),
            "rule": self._policy.state(),
            "tracks": self._tracks.rows.state(),
            "window": self._window.state(),
            "dealer": self._dealer.state(),
            "current": self._share_D.tolist(),
            "step": self._step,
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any], config: DomainScheduleConfig) -> DomainScheduler:
        """Continue exactly where `state` was taken; shares declared in a live run stay.

        Raises:
            UserError: if another version of the program wrote it.
        """
        require_version(state, STATE_VERSION, "scheduler state")
        shares = {n: DomainShare.model_validate(s) for n, s in state["shares"].items()}
        scheduler = cls(tuple(state["domains"]), config.model_copy(update={"domains": shares}))
        scheduler._quarantined = dict(state["quarantined"])
        # Another rule than the one that was saved begins anew on the same tracks.
        if state["policy"] == config.policy:
            scheduler._policy.load(state["rule"])
            scheduler._dealer.load(state["dealer"])
            scheduler._share_D = np.array(state["current"], dtype=np.float64)
        scheduler._tracks.rows.load(state["tracks"])
        scheduler._window.load(state["window"])
        scheduler._step = int(state["step"])
        scheduler._prices = None
        scheduler._roster_changed()
        return scheduler

    def _choose(self, eligible: Bools) -> tuple[int, PickReason]:
        overdue = self._dealer.overdue(eligible, self._deadlines)
        if overdue is not None:
            return overdue, PickReason.FLOOR
        index = np.where(eligible, self._tracks.rows["next_index"], np.inf)
        newest = int(index.argmin())
        if index[newest] < self._config.warmup_picks:
            return newest, PickReason.WARMUP
        if self._policy.protects and self._dealer.floor_due >= 0.0:
            return self._dealer.by_floor(eligible, self._wishes.weight_D), PickReason.FLOOR
        return self._dealer.by_share(eligible, self._share_D), PickReason.VALUE

    def _decide(self) -> None:
        view = View(
            step=max(self._step, 0),
            active_D=self._active,
            weight_D=self._wishes.weight_D,
            low_D=self._wishes.low_D,
            high_D=self._wishes.high_D,
            cost_D=self._tracks.cost_per_rollout(),
            learnability_D=self._tracks.learnability(),
            false_pass_D=self._tracks.rows["false_pass"],
            pass_DK=self._pass_rates()[:, None],
            size_D=np.ones(len(self._names)),
        )
        # Somebody may have joined or left while all others are in quarantine.
        some = self._active.any()
        self._share_D = self._policy.decide(view) if some else np.zeros(len(self._names))

    def _pass_rates(self) -> Floats:
        """One half counts as one group, so that nobody begins solved or hopeless."""
        rows = self._tracks.rows
        rates: Floats = (rows["passed"] + 0.5) / (rows["groups"] + 1.0)
        return rates

    def _roster_changed(self) -> None:
        """Names, quarantine or wishes are others now."""
        self._row = {name: row for row, name in enumerate(self._names)}
        self._active = np.array([n not in self._quarantined for n in self._names], dtype=np.bool_)
        self._active_names = tuple(n for n in self._names if n not in self._quarantined)
        floor = self._config.floor if self._policy.protects else 0.0
        self._wishes: Wishes = wishes_above_floor([self._shares[n] for n in self._names], floor)
        self._deadlines = self._dealer.deadlines(self._wishes.weight_D, self._config.floor)
        self._prices = None

    def _current_prices(self) -> Prices:
        if self._prices is None:
            self._prices = self._tracks.prices()
        return self._prices

    def _budget_shares(self, row: int) -> tuple[float, float]:
        """Target share of the whole budget, and the floor's part of it; 0 in quarantine."""
        if not self._active[row]:
            return 0.0, 0.0
        floor = self._config.floor if self._policy.protects else 0.0
        weight = self._wishes.weight_D
        protected = floor * float(weight[row] / weight[self._active].sum())
        above = float(self._share_D[row] / max(self._share_D[self._active].sum(), 1e-300))
        return (1.0 - floor) * above + protected, protected
