"""A share in words."""

from __future__ import annotations

from collections.abc import Mapping

from burnish.schedule.picks import DomainShare, Explanation
from burnish.schedule.values.base import Unit
from burnish.schedule.values.names import PolicyName

# A share counts as held by its bound within this.
_AT_BOUND = 1e-3


def explanation(
    domain: str,
    *,
    policy: PolicyName,
    unit: Unit,
    shares: tuple[float, float],
    max_gap_picks: int,
    terms: Mapping[str, float],
    wish: DomainShare,
    quarantined: str | None,
) -> Explanation:
    """Put together why a domain has its share; `shares` are the whole and the floor's part."""
    share, floor_share = shares
    reasons = [_reason(policy, terms)]
    if floor_share:
        reasons.append(f"floor {floor_share:.1%}")
    if wish.weight != 1.0:
        reasons.append(f"weight {wish.weight:g}")
    if wish.min_share and share <= wish.min_share + _AT_BOUND:
        reasons.append(f"held up by min_share {wish.min_share:g}")
    if share >= wish.max_share - _AT_BOUND and wish.max_share < 1.0:
        reasons.append(f"held down by max_share {wish.max_share:g}")
    reasons.append(f"waits at most {max_gap_picks} groups")
    text = f"{share:.1%} of {unit.value}: {'; '.join(reasons)}"
    if quarantined is not None:
        text = f"nothing: quarantined, {quarantined}"
    return Explanation(
        domain=domain,
        policy=policy.value,
        unit=unit.value,
        share=share,
        floor_share=floor_share,
        max_gap_picks=max_gap_picks,
        terms=dict(terms),
        text=text,
    )


def _reason(policy: PolicyName, terms: Mapping[str, float]) -> str:
    if policy is not PolicyName.VALUE:
        own = (f"{name} {value:.3g}" for name, value in terms.items() if name != "share")
        return ", ".join((policy.value, *own))
    text = (
        f"gains {terms['slope']:+.1e} per rollout (sd {terms['slope_sd']:.0e}), "
        f"spread {terms['learnability']:.2f}, cost {terms['cost']:.3g} per rollout"
    )
    if terms["false_pass"]:
        text += f", {terms['false_pass']:.0%} of passes undeserved"
    return text
