"""What an engine tells a dashboard."""

from typing import NamedTuple


class EngineStats(NamedTuple):
    """A snapshot; counters are totals since the start."""

    busy_ratio: float
    """Share of the engine's lifetime spent computing, in [0, 1]."""
    busy_s: float
    """Seconds spent computing since the start."""
    tokens_per_busy_s: float
    """Sampled tokens per second of computing."""
    num_steps: int
    """Forwards."""
    sampled_tokens: int
    """Tokens sampled."""
    prompt_tokens: int
    """Prompt tokens computed, recomputation after a preemption included."""
    cached_tokens: int
    """Prompt tokens found in the prefix index."""
    num_preemptions: int
    """Sequences that had to give their pages back."""
    num_outstanding: int
    """Requests not answered yet."""
    num_running: int
    """Of these, sequences that hold pages."""
    free_pages: int
    """Pages that can be handed out."""
    num_pages: int
    """All pages."""
