"""What a simulated pipeline achieved."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class PipelineResult(NamedTuple):
    """Figures of one simulated run, after its warm-up steps."""

    tokens_per_s: float
    """Trained tokens per second."""
    slot_load: float
    """Used share of the decode slots of engines while they are engines."""
    idle_ratio: float
    """Share of accelerator time in which nothing ran on it."""
    waste_ratio: float
    """Sampled tokens that were never trained: failed, dropped, cancelled."""
    num_failed: int
    """Attempts that failed."""
    failed_per_step: float
    """The same for each training step."""
    queue_p99_s: float
    """99% of requests found a slot within this."""
    lag_mean: float
    """Versions between dispatch and training."""
    step_s: float
    """Seconds per training step."""
    open_attempts: tuple[int, ...] = ()
    """Ended attempts of each broken domain before its breaker first opened."""
    open_s: tuple[float, ...] = ()
    """Seconds from its first failure to that."""
    num_never_opened: int = 0
    """Broken domains with at least eight failed attempts whose breaker never opened."""
    num_false_opens: int = 0
    """Openings for domains that are not broken."""
    num_healthy: int = 0
    """Domains that are not broken."""


def percentile(values: list[float], q: float) -> float:
    """0.0 of nothing."""
    return float(np.percentile(values, q)) if values else 0.0
