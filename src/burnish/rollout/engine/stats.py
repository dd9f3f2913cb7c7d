"""What an engine tells a dashboard."""

from typing import NamedTuple

from burnish.core.vocabulary import NoDraft
from burnish.rollout.engine.histogram import Histogram
from burnish.rollout.engine.tier.limits import TierStats


class EngineStats(NamedTuple):
    """A snapshot; counters are totals since the start. None: a server does not tell."""

    busy_ratio: float
    """Share of the engine's lifetime spent computing, in [0, 1]."""
    busy_s: float
    """Seconds spent computing since the start."""
    tokens_per_busy_s: float
    """Sampled tokens per second of computing."""
    num_steps: int | None
    """Forwards."""
    sampled_tokens: int
    """Tokens sampled."""
    prompt_tokens: int
    """Prompt tokens computed, recomputation after a preemption included."""
    cached_tokens: int | None
    """Prompt tokens found in the prefix index."""
    num_preemptions: int | None
    """Sequences that had to give their pages back."""
    num_swaps: int | None
    """Of these, those whose pages went to host memory."""
    num_failed: int
    """Requests that ended with a failure of their own."""
    drafted_tokens: int
    """Guesses that were checked."""
    accepted_tokens: int
    """Of these, those that were right."""
    undrafted: tuple[tuple[NoDraft, int], ...]
    """How often a decoding sequence had no guess in a step, by reason."""
    adapted_tokens: int
    """Of the sampled tokens, those that went through an adapter."""
    held_tokens: int
    """Of the sampled tokens, those under a grammar."""
    num_outstanding: int
    """Requests not answered yet."""
    num_running: int | None
    """Sequences in the batch; of servers, also those of other clients."""
    num_waiting: int | None
    """Sequences that wait for a place in it."""
    free_pages: int | None
    """Pages that can be handed out."""
    num_pages: int | None
    """All pages."""
    used_page_ratio: float | None
    """Share of the pages that sequences or pins hold, in [0, 1]; of servers the fullest."""
    saved_bytes: int | None
    """Host memory that holds pages of preempted sequences."""
    queue: Histogram
    """From arrival to the first forward."""
    first_token: Histogram
    """From arrival to the first sampled token."""
    inter_token: Histogram
    """Between two tokens of one request."""

    num_adapters: int = 0
    """Adapters that requests can name."""
    mask_s: float = 0.0
    """Seconds that steps waited for what grammars allow, totals since the start."""
    kv_gap_nats: float = 0.0
    """Sum of |log-prob under full attention - log-prob| over the tokens that were compared."""
    kv_gap_tokens: int = 0
    """Sampled tokens that were compared: none unless `engine.kv.report_gap` is on."""
    tier: TierStats = TierStats()
    """Keys and values in memory and on disk, where the cache has both."""

    @property
    def prefix_hit_ratio(self) -> float | None:
        """Share of prompt tokens that did not have to be computed, in [0, 1]."""
        if self.cached_tokens is None:
            return None
        prompt = self.cached_tokens + self.prompt_tokens
        return self.cached_tokens / prompt if prompt else 0.0

    @property
    def acceptance_ratio(self) -> float:
        """Share of the guesses that were right, in [0, 1]."""
        return self.accepted_tokens / self.drafted_tokens if self.drafted_tokens else 0.0
