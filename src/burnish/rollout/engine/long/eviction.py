"""Which pages of a request are given back. Pure: numbers in, indices out.

Eviction is by whole pages of all layers and heads: that is what the pool can use again. H2O
(Zhang et al. 2023) and SnapKV (Li et al. 2024) evict single keys per head; here the attention that
falls on a page is summed over heads and layers.
"""

from collections.abc import Sequence as Seq

from burnish.core.vocabulary import KvPolicyKind
from burnish.rollout.engine.long.policy import KvPolicy


def drops(
    policy: KvPolicy,
    page_size: int,
    held: Seq[int],
    *,
    num_computed: int,
    num_prompt: int,
    before: int,
    mass: Seq[float],
) -> list[int]:
    """Indices of pages to give back now, ascending.

    Args:
        policy: what to keep.
        page_size: tokens of a page.
        held: indices of the pages that the request holds, ascending.
        num_computed: its tokens in the cache.
        num_prompt: tokens of its prompt.
        before: its tokens in the cache before this step.
        mass: attention that has fallen on each page so far, by index; shorter ones mean 0.
    """
    if policy.kind is KvPolicyKind.WINDOW:
        return _outside(policy, page_size, held, num_computed)
    if policy.kind is KvPolicyKind.H2O or (
        policy.kind is KvPolicyKind.SNAPKV and before < num_prompt <= num_computed
    ):
        return _lightest(policy, page_size, held, num_computed, mass)
    return []


def _outside(policy: KvPolicy, size: int, held: Seq[int], num_computed: int) -> list[int]:
    """Pages that no later token can see."""
    assert policy.window is not None
    first, low = policy.sink_pages(size), num_computed - policy.window + 1
    return [i for i in held if i >= first and (i + 1) * size <= low]


def _lightest(
    policy: KvPolicy, size: int, held: Seq[int], num_computed: int, mass: Seq[float]
) -> list[int]:
    num_full = num_computed // size
    used = [i for i in held if i * size < num_computed]
    excess = len(used) - policy.budget_pages(size)
    if excess <= 0:
        return []
    first, last = policy.sink_pages(size), num_full - policy.recent_pages(size)
    # What was attended as often: the older goes first.
    candidates = sorted((mass[i] if i < len(mass) else 0.0, i) for i in used if first <= i < last)
    return sorted(i for _, i in candidates[:excess])
