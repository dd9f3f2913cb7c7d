"""Regression gate: whether a model may replace the one before it. Nothing passes for lack of data.

Per domain, two questions with a yes or no each: is a loss shown (Holm-corrected, two-sided), and is
it shown that the model is not worse by `margin` (one-sided lower bound above -margin)?

    loss shown   not worse shown   domain's action
    no           yes               promote
    yes          yes               raise_floor    a real but small loss: rehearse more
    yes          no                roll_back
    no           no                underpowered   more tasks are needed

The worst action of any domain is the answer. Promotion needs every domain to pass, so it needs no
correction for their number (intersection-union test, Berger 1982).
"""

from __future__ import annotations

from enum import StrEnum

from burnish.core.records import Record
from burnish.evaluate.comparison import Comparison, DifferenceVerdict, DomainComparison
from burnish.evaluate.significance import noninferiority_power


class GateAction(StrEnum):
    """What to do with the model, best first."""

    PROMOTE = "promote"
    """Every domain is shown to be no worse than the margin."""
    UNDERPOWERED = "underpowered"
    """Nothing bad is shown, and neither is that nothing is: evaluate on more tasks."""
    RAISE_FLOOR = "raise_floor"
    """A domain lost a little: give it a larger protected share."""
    ROLL_BACK = "roll_back"
    """A domain lost, by more than the margin for all that is known."""


class DomainGate(Record, frozen=True, kw_only=True):
    """One domain's part in the decision."""

    action: GateAction
    """What this domain alone would call for."""
    one_sided_low: float
    """Lower bound of the difference."""
    power: float
    """Chance to pass if nothing has changed: below about 0.8 the suite is too small."""


class GateDecision(Record, frozen=True, kw_only=True):
    """The decision with its reasons."""

    action: GateAction
    """What to do."""
    margin: float
    """Loss of pass rate that is tolerated."""
    domains: dict[str, DomainGate]
    """By name."""


def gate(comparison: Comparison, margin: float) -> GateDecision:
    """Decide on `comparison.after_label` with a tolerated loss of `margin` per domain."""
    assert 0.0 < margin <= 1.0
    domains = {
        name: _gate_domain(c, margin, comparison.alpha) for name, c in comparison.domains.items()
    }
    order = list(GateAction)
    # No domain, no evidence.
    worst = max((d.action for d in domains.values()), key=order.index, default=None)
    return GateDecision(
        action=GateAction.UNDERPOWERED if worst is None else worst, margin=margin, domains=domains
    )


def _gate_domain(domain: DomainComparison, margin: float, alpha: float) -> DomainGate:
    loss = domain.verdict is DifferenceVerdict.LOSS
    not_worse = domain.one_sided_low > -margin
    if loss:
        action = GateAction.RAISE_FLOOR if not_worse else GateAction.ROLL_BACK
    else:
        action = GateAction.PROMOTE if not_worse else GateAction.UNDERPOWERED
    return DomainGate(
        action=action,
        one_sided_low=domain.one_sided_low,
        power=noninferiority_power(domain.diffs, margin, alpha),
    )
