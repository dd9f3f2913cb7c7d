"""When a job lends units that it does not use, and when it wants them back.

A run waits: its trainer for rollouts, its engine for tools and verdicts, the whole of it for a
person who paused it. What counts is its demand, the cores that its threads use or wait for. A job
lends what it did not demand at any look of a quiet time; it wants all back as soon as what it kept
is in use. Whoever had to take back soon lends later next time, so that guests are not started only
to be stopped.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

# Cores beyond the highest demand that was seen are kept: demand is measured with noise.
_MARGIN = 0.25
# Part of the kept units in use at which the rest is wanted back.
_BUSY = 0.85
_MOST_QUIET_S = 3600.0


@dataclass
class _Job:
    """What is known of one job."""

    quiet_s: float
    since_s: float
    highest: float = 0.0
    lent: int = 0
    lent_s: float = field(default=0.0)


class Lending:
    """Pure: time and demand come with the call."""

    def __init__(self, quiet_s: float) -> None:
        """Lend after so much quiet time; 0.0 never lends."""
        self._quiet_s = quiet_s
        self._jobs: dict[str, _Job] = {}

    def look(self, job_id: str, units: int, demand: float, now_s: float) -> int:
        """Units that a running job lends from now on.

        Args:
            job_id: whose.
            units: that it holds.
            demand: cores that it has used or waited for since the last look.
            now_s: the time.
        """
        if self._quiet_s == 0.0 or units < 2:
            return 0
        job = self._jobs.get(job_id)
        if job is None:
            job = self._jobs[job_id] = _Job(self._quiet_s, now_s)
        if job.lent:
            if demand >= _BUSY * (units - job.lent):
                if now_s - job.lent_s < 2.0 * job.quiet_s:
                    job.quiet_s = min(2.0 * job.quiet_s, _MOST_QUIET_S)
                job.lent, job.highest, job.since_s = 0, demand, now_s
            return job.lent
        job.highest = max(job.highest, demand)
        spare = units - max(math.ceil(job.highest + _MARGIN), 1)
        if spare < 1:
            job.highest, job.since_s = 0.0, now_s
        elif now_s - job.since_s >= job.quiet_s:
            job.lent, job.lent_s = spare, now_s
        return job.lent

    def forget(self, job_id: str) -> None:
        """It runs no more; what it had learned of its quiet time goes with it."""
        self._jobs.pop(job_id, None)
