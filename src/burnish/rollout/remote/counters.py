"""What the client counts, and what it makes of it."""

from burnish.rollout.engine.histogram import Timer
from burnish.rollout.engine.stats import EngineStats
from burnish.rollout.remote.dialect import Drafts


class Counters:
    """Totals since the start."""

    def __init__(self) -> None:
        """All zero."""
        self.sampled_tokens = self.prompt_tokens = self.cached_tokens = 0
        self.adapted_tokens = self.held_tokens = 0
        self.num_requests = self.num_moves = self.num_failures = 0
        self.drafts = Drafts(0, 0)
        self._last_drafts: dict[str, Drafts] = {}
        self.queue, self.first_token, self.inter_token = Timer(), Timer(), Timer()

    def note_drafts(self, url: str, now: Drafts | None) -> None:
        """Take in what a server counts: from the first look on, and anew after a restart."""
        if now is None:
            return
        last = self._last_drafts.get(url, now)
        if now.drafted_tokens < last.drafted_tokens:
            last = Drafts(0, 0)
        self._last_drafts[url] = now
        self.drafts = Drafts(
            self.drafts.drafted_tokens + now.drafted_tokens - last.drafted_tokens,
            self.drafts.accepted_tokens + now.accepted_tokens - last.accepted_tokens,
        )

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
            drafted_tokens=self.drafts.drafted_tokens,
            accepted_tokens=self.drafts.accepted_tokens,
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
