"""What a fleet has done."""

from burnish.rollout.engine.histogram import Timer


class Counters:
    """Totals since the start."""

    def __init__(self) -> None:
        """All zero."""
        self.sampled_tokens = self.prompt_tokens = self.cached_tokens = 0
        self.num_requests = self.num_moves = self.num_failures = 0
        self.queue, self.first_token, self.inter_token = Timer(), Timer(), Timer()
