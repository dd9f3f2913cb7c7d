"""Sizes and counters of an engine."""

from typing import NamedTuple

from burnish.core.errors import UserError
from burnish.core.vocabulary import DraftSampling, KvDtype, KvPolicyKind, NoDraft, Speculation
from burnish.rollout.engine.long.policy import KvPolicy
from burnish.rollout.engine.tier.limits import TierLimits


class SpeculationLimits(NamedTuple):
    """Who guesses, and how much."""

    kind: Speculation = Speculation.OFF
    """Who."""
    max_tokens: int = 8
    """Most guesses per sequence and step; the cost model takes fewer where they do not pay."""
    num_layers: int = 0
    """Layers of an early exit; 0 takes a quarter."""
    max_lag: int | None = 0
    """Versions that a draft model's weights may be behind before it stands aside; None: any."""
    sampling: DraftSampling = DraftSampling.COUPLED
    """How a drafting model draws."""


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
    speculation: SpeculationLimits = SpeculationLimits()
    """Guesses that one forward checks."""
    device: str = "cpu"
    """Where weights and cache lie."""
    flex: bool = False
    """On CUDA, attend by PyTorch's flex attention."""

    def check(self) -> None:
        """Refuse what contradicts itself.

        Raises:
            UserError: naming the two values.
        """
        self._check_speculation()
        if self.device.partition(":")[0] != "cpu":
            self._check_device()
        if self.flex and (
            self.device.partition(":")[0] != "cuda" or self.kv_dtype is not KvDtype.MODEL
        ):
            raise UserError(
                f"engine.flex_attention is for CUDA and keys and values of the model's own type, "
                f"not for {self.device} and {self.kv_dtype}.",
                fix='set engine.flex_attention = false, or engine.device = "cuda" and '
                'engine.kv_dtype = "model".',
            )
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

    def attending_by(self, kv: KvPolicy) -> "CoreLimits":
        """The same sizes with another policy for keys and values that are in the cache already.

        Raises:
            UserError: if they do not allow for it.
        """
        # The bounds that pages are selected by are kept from the first key on, or never.
        selects_anew = kv.kind is KvPolicyKind.QUEST and self.kv.kind is not KvPolicyKind.QUEST
        # On disk, requests were admitted by what they attend at once.
        if kv.evicts or self.kv.evicts or selects_anew or self.tier is not None:
            raise UserError(
                f"engine.kv.policy cannot change from {self.kv.kind} to {kv.kind} under way.",
                fix=f"open the engine with {KvPolicyKind.QUEST} and no disk tier, or another one.",
            )
        changed = self._replace(kv=kv)
        changed.check()
        return changed

    def _check_device(self) -> None:
        for key, is_used, plain in (
            ("exact", self.exact, "false"),
            ("kv.policy", self.kv.is_sparse, KvPolicyKind.FULL),
            ("kv.disk_mb", self.tier is not None, "0"),
        ):
            if is_used:
                raise UserError(
                    f"engine.{key} works on this machine's processors, not on {self.device}.",
                    fix=f'set engine.{key} to {plain}, or engine.device to "cpu".',
                )

    def _check_speculation(self) -> None:
        if self.speculation.max_tokens < 1:
            raise UserError(
                f"draft_tokens is {self.speculation.max_tokens}.",
                fix='use >= 1, or speculation = "off".',
            )
        kind, sampling = self.speculation.kind, self.speculation.sampling
        if self.exact and kind is not Speculation.OFF and sampling is DraftSampling.REJECTION:
            raise UserError(
                "exact mode cannot draft by rejection: a seed's tokens would depend on the drafts.",
                fix=f"set engine.draft_sampling to {DraftSampling.COUPLED}.",
            )
        if kind is not Speculation.OFF and self.kv.is_sparse:
            raise UserError(
                f"engine.speculation is {kind}, but under engine.kv.policy {self.kv.kind} a guess "
                "would be checked over other keys than a token is sampled from.",
                fix=f"set engine.kv.policy to {KvPolicyKind.FULL}, or engine.speculation to off.",
            )
        if kind is Speculation.DRAFT and self.tier is not None:
            raise UserError(
                "a draft model's keys and values cannot go to disk, which engine.kv.disk_mb asks.",
                fix="set engine.speculation to lookup or self, or engine.kv.disk_mb to 0.",
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
    drafted_tokens: int = 0
    """Guesses that were checked."""
    accepted_tokens: int = 0
    """Of these, those that were right."""
    undrafted: tuple[tuple[NoDraft, int], ...] = ()
    """How often a decoding sequence had no guess in a step, by reason."""
    adapted_tokens: int = 0
    """Of the sampled tokens, those that went through an adapter."""
    held_tokens: int = 0
    """Of the sampled tokens, those under a grammar."""
    mask_s: float = 0.0
    """Seconds that steps waited for what grammars allow."""
    kv_gap_nats: float = 0.0
    """Sum of |log-prob under full attention - log-prob| over the tokens that were compared."""
    kv_gap_tokens: int = 0
    """Sampled tokens of requests that `KvPolicy.report_gap` compared."""
