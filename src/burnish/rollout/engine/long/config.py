"""The part of a run's configuration that says which keys and values are kept, and where."""

from typing import Annotated

from pydantic import Field

from burnish.core.config import Config
from burnish.core.vocabulary import KvPolicyKind
from burnish.rollout.engine.long.policy import KvPolicy
from burnish.rollout.engine.tier.limits import TierLimits

_Tokens = Annotated[int, Field(ge=0, le=10**8)]
_MiB = 1 << 20


class KvConfig(Config):
    """Keys and values of long contexts."""

    policy: KvPolicyKind = KvPolicyKind.FULL
    """`full`; `window`: first and last tokens; `quest`: decoded tokens attend the pages that may
    matter most; `h2o`, `snapkv`: pages that little attention falls on are given back. All but
    `full` change log-probs: `report_gap` measures by how much."""
    budget_tokens: Annotated[int, Field(gt=0, le=10**8)] = 4096
    """Keys that a token attends or that a request keeps, unless the policy is `full`."""
    sink_tokens: _Tokens = 16
    """First tokens that always stay."""
    recent_tokens: _Tokens = 256
    """Last tokens that always stay, under `quest`, `h2o` and `snapkv`."""
    prefill_window: _Tokens = 0
    """Under `quest`, tokens of a prompt see this many back and the first ones; 0 for all."""
    report_gap: bool = False
    """Compute every sampled token's log-prob under full attention too, at the end of each request:
    the metric `engine_kv_gap` and `Generation.dense_logprobs`. Costs a prefill over all keys per
    request: to choose a policy by, then turn it off."""
    ram_mb: Annotated[int, Field(gt=0, le=10**8)] = 1024
    """Keys and values in memory, MiB, where there is a disk tier."""
    disk_mb: _Tokens = 0
    """Keys and values on disk, MiB; 0 keeps all in memory. Needs Linux."""
    disk_dir: str = ""
    """Directory of the disk tier, on a fast local disk; empty for the temporary directory."""
    prefetch: bool = True
    """Read from disk what the next layer will want while this one computes."""

    def build_policy(self) -> KvPolicy:
        """What is attended and kept."""
        return KvPolicy(
            kind=self.policy,
            budget_tokens=self.budget_tokens,
            sink_tokens=self.sink_tokens,
            recent_tokens=self.recent_tokens,
            prefill_window=self.prefill_window,
            report_gap=self.report_gap,
        )

    def build_tier(self) -> TierLimits | None:
        """Where pages go that do not fit into memory; None without a disk tier."""
        if not self.disk_mb:
            return None
        return TierLimits(
            ram_bytes=self.ram_mb * _MiB,
            disk_bytes=self.disk_mb * _MiB,
            directory=self.disk_dir,
            prefetch=self.prefetch,
        )
