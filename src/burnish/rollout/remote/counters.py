"""What the client counts, and what it makes of it."""

from collections.abc import Iterable

from burnish.rollout.engine.histogram import Timer
from burnish.rollout.engine.stats import EngineStats
from burnish.rollout.remote.dialect import Drafts, ServerCounts


class Counters:
    """Totals since the start."""

    def __init__(self) -> None:
        """All zero."""
        self.sampled_tokens = self.prompt_tokens = self.cached_tokens = 0
        self.tells_cached = False
        """Whether any server has said how much it reused; vLLM is silent where it is nothing."""
        self.adapted_tokens = self.held_tokens = 0
        self.num_requests = self.num_moves = self.num_failures = 0
        self.drafts = Drafts(0, 0)
        self.num_preemptions: int | None = None
        """None until a server has said any number."""
        self._last_drafts: dict[str, Drafts] = {}
        self._said: dict[str, ServerCounts] = {}
        self._last_preemptions: dict[str, int] = {}
        self.queue, self.first_token, self.inter_token = Timer(), Timer(), Timer()

    def note(self, url: str, now: ServerCounts | None) -> None:
        """Take in what a server counts: from the first look on, and anew after a restart.

        None: it does not answer, and what it said before is no longer true.
        """
        self._said[url] = now or ServerCounts()
        if now is None:
            return
        if now.drafts is not None:
            self._note_drafts(url, now.drafts)
        if now.num_preemptions is not None:
            last = self._last_preemptions.get(url, now.num_preemptions)
            new = now.num_preemptions - (last if last <= now.num_preemptions else 0)
            self.num_preemptions = (self.num_preemptions or 0) + new
            self._last_preemptions[url] = now.num_preemptions

    def _note_drafts(self, url: str, now: Drafts) -> None:
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
        num_adapters: int,
    ) -> EngineStats:
        """As seen from here, and what the servers say; None where they do not."""
        said = self._said.values()
        used = [each.used_page_ratio for each in said if each.used_page_ratio is not None]
        return EngineStats(
            busy_ratio=busy_s / uptime_s if uptime_s > 0 else 0.0,
            busy_s=busy_s,
            tokens_per_busy_s=self.sampled_tokens / busy_s if busy_s > 0 else 0.0,
            num_steps=None,
            sampled_tokens=self.sampled_tokens,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens if self.tells_cached else None,
            num_preemptions=self.num_preemptions,
            num_swaps=None,
            num_failed=self.num_failures,
            drafted_tokens=self.drafts.drafted_tokens,
            accepted_tokens=self.drafts.accepted_tokens,
            undrafted=(),
            adapted_tokens=self.adapted_tokens,
            held_tokens=self.held_tokens,
            num_outstanding=num_outstanding,
            num_adapters=num_adapters,
            num_running=_sum(each.num_running for each in said),
            num_waiting=_sum(each.num_waiting for each in said),
            free_pages=None,
            num_pages=None,
            # The fullest is the one that preempts.
            used_page_ratio=max(used, default=None),
            saved_bytes=None,
            queue=self.queue.snapshot(),
            first_token=self.first_token.snapshot(),
            inter_token=self.inter_token.snapshot(),
        )


def _sum(values: Iterable[int | None]) -> int | None:
    """Over those that are known; None if none is."""
    known = [value for value in values if value is not None]
    return sum(known) if known else None
