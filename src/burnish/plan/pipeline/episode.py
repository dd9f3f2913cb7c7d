"""Episodes and groups inside the simulation: mutable, and nothing else knows them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from burnish.plan.pipeline.engines import SimEngine
    from burnish.plan.pipeline.workload import SimDomain


class SimGroup:
    """Samples of one task."""

    def __init__(self, group_id: str, domain: SimDomain, version: int, size: int) -> None:
        """All samples are to come."""
        self.group_id, self.domain, self.version = group_id, domain, version
        self.left = size
        self.num_failed = 0
        self.tokens = 0.0
        self.episodes: list[SimEpisode] = []
        self.is_gone = False
        self.held: list[SimEpisode] = []
        """Episodes that wait until one of the others came through."""


class SimEpisode:
    """One sample, through all of its attempts."""

    def __init__(self, group: SimGroup, num_turns: int, started_s: float) -> None:
        """Not begun."""
        self.group, self.num_turns, self.started_s = group, num_turns, started_s
        self.tokens = 0.0
        self.segment = 0.0
        self.turn = 0
        self.attempts = 1
        self.is_over = False
        self.is_coming = False
        """Admitted, and the engine has not heard of it yet."""
        self.engine: SimEngine | None = None
        self.asked_s = 0.0
