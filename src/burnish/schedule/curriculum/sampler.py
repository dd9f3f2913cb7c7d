"""How many groups to sample so that what survives the filter has the ratios asked for.

Groups without variance are dropped after they were paid for, and each domain loses another part of
its groups. MT-GRPO (arXiv 2602.05547) oversamples by the inverse of the recent acceptance.
"""

from __future__ import annotations

from collections.abc import Sequence

# Oversampling beyond this buys noise: a domain that passes less than a fifth is not to be forced.
MOST_OVERSAMPLING = 5.0


def oversampled(ratios: Sequence[float], acceptance: Sequence[float], num_groups: int) -> list[int]:
    """Groups to sample per domain, `num_groups` together (largest remainder)."""
    assert len(ratios) == len(acceptance)
    lifts = [min(1.0 / max(a, 1e-9), MOST_OVERSAMPLING) for a in acceptance]
    weights = [r * lift for r, lift in zip(ratios, lifts, strict=True)]
    total = sum(weights)
    assert total > 0.0
    exact = [num_groups * w / total for w in weights]
    counts = [int(e) for e in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: counts[i] - exact[i])
    for i in by_remainder[: num_groups - sum(counts)]:
        counts[i] += 1
    return counts
