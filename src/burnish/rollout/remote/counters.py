"""What the client counts, and what it makes of it."""

from burnish.rollout.engine.histogram import Timer
from burnish.rollout.engine.stats import EngineStats


class Counters:
    """Totals since the start."""

    def __init__(self) -> None:
        """All zero."""
        self.sampled_tokens = self.prompt_tokens = self.cached_tokens = 0
        self.adapted_tokens = self.held_tokens = 0
        self.num_requests = self.num_moves = self.num_failures = 0
        self.queue, self.first_token, self.inter_token = Timer(), Timer(), Timer()

    def snapshot(
        self,
        *,
        uptime_s: float,
        busy_s: float,
        num_outstanding: int,
        num_running: int,
        num_adapters: int,
    ) -> EngineStats:
        """As seen from here: the servers count their own steps."""
        return EngineStats(
            busy_ratio=busy_s / uptime_s if uptime_s > 0 else 0.0,
            busy_s=busy_s,
            tokens_per_busy_s=self.sampled_tokens / busy_s if busy_s > 0 else 0.0,
            num_steps=0,
            sampled_tokens=self.sampled_tokens,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            num_preemptions=0,
            num_swaps=0,
            num_failed=self.num_failures,
            drafted_tokens=0,
            accepted_tokens=0,
            undrafted=(),
            adapted_tokens=self.adapted_tokens,
            held_tokens=self.held_tokens,
            num_outstanding=num_outstanding,
            num_adapters=num_adapters,
            num_running=num_running,
            num_waiting=0,
            # Of the servers' caches nothing is known here.
            free_pages=1,
            num_pages=1,
            saved_bytes=0,
            queue=self.queue.snapshot(),
            first_token=self.first_token.snapshot(),
            inter_token=self.inter_token.snapshot(),
        )
