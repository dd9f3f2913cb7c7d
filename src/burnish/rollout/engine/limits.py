"""Sizes and counters of an engine."""

from typing import NamedTuple

from burnish.core.errors import UserError
from burnish.core.vocabulary import KvDtype, KvPolicyKind
from burnish.rollout.engine.long.policy import KvPolicy
from burnish.rollout.engine.tier.limits import TierLimits


class CoreLimits(NamedTuple):
    """Sizes of an engine."""

    num_pages: int = 4096
    """Pages of the cache; memory is used as they are first touched."""
    page_size: int = 16
    """Tokens per page."""
    max_running: int = 256
    """Most sequences in one step."""
    budget_tokens: int = 1024
    """Most tokens in one step: what a long prompt may delay those that decode."""
    ageing_steps: int = 512
    """Steps of waiting that outweigh one level of priority."""
    swap_bytes: int = 1 << 30
    """Host memory for pages of preempted sequences; 0 computes them again instead."""
    kv_dtype: KvDtype = KvDtype.MODEL
    """Numbers of the cache."""
    kv: KvPolicy = KvPolicy()
    """Which keys are attended and kept."""
    tier: TierLimits | None = None
    """Where pages go that do not fit into memory; None keeps all in memory."""
    exact: bool = False
    """Tokens and log-probs depend on nothing but the request and the weights."""

    def check(self) -> None:
        """Refuse what contradicts itself.

        Raises:
            UserError: naming the two values.
        """
        if self.exact and self.kv_dtype is not KvDtype.MODEL:
            raise UserError(
                f"exact mode cannot keep keys and values as {self.kv_dtype}: the trainer does not.",
                fix=f"set engine.kv_dtype to {KvDtype.MODEL}, or engine.exact to false.",
            )
        if self.exact and self.kv.is_sparse:
            raise UserError(
                f"exact mode cannot attend by engine.kv.policy {self.kv.kind}: the trainer does "
                "not.",
                fix=f"set engine.kv.policy to {KvPolicyKind.FULL}, or engine.exact to false.",
            )


class CoreCounters(NamedTuple):
    """Totals since the start."""

    num_steps: int = 0
    """Forwards."""
    sampled_tokens: int = 0
    """Tokens sampled."""
    prompt_tokens: int = 0
    """Prompt tokens computed, recomputation after preemption included."""
    cached_tokens: int = 0
    """Prompt tokens found in the prefix index."""
    num_preemptions: int = 0
    """Sequences that had to give their pages back."""
    num_swaps: int = 0
    """Of these, those whose pages went to host memory."""
    num_failed: int = 0
    """Requests that ended with a failure of their own."""
