"""The systems that others run, to compare with: a barrier, over-sampling, a cap on episodes.

All draw domains uniformly, retry a failed attempt three times, and know no breaker.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from burnish.plan.pipeline.episode import SimEpisode, SimGroup
from burnish.plan.pipeline.simulator import Simulator

_MAX_ATTEMPTS = 4


class Plain(ABC):
    """What the baselines share; first come, first served."""

    def __init__(self, groups_per_batch: int) -> None:
        """Nothing is done."""
        self.groups_per_batch = groups_per_batch
        self.done: list[SimGroup] = []

    def fill(self, sim: Simulator) -> None:
        """Start what `wanted` says."""
        for _ in range(self.wanted(sim)):
            self.start_one(sim)

    @abstractmethod
    def wanted(self, sim: Simulator) -> int:
        """Groups to start now."""

    def start_one(self, sim: Simulator) -> None:
        """Start a group of any domain."""
        domains = sim.workload.domains
        domain = domains[int(sim.rng.integers(len(domains)))]
        sim.launch(domain, f"{domain.name}/{sim.num_groups}")

    def choose(self, sim: Simulator, queue: list[SimEpisode]) -> int:
        """The first."""
        return 0

    def failed(self, sim: Simulator, episode: SimEpisode) -> bool:
        """Up to three more tries."""
        return episode.attempts < _MAX_ATTEMPTS

    def judged(self, sim: Simulator, episode: SimEpisode) -> None:  # noqa: B027
        """Nothing to learn."""

    def ended(self, sim: Simulator, group: SimGroup, *, trainable: bool) -> None:
        """Keep it for a batch."""
        if trainable:
            self.done.append(group)

    def next_batch(self, sim: Simulator) -> list[SimGroup] | None:
        """The oldest versions first."""
        size = self.groups_per_batch
        if len(self.done) < size:
            return None
        self.done.sort(key=lambda group: group.version)
        batch, self.done = self.done[:size], self.done[size:]
        return batch

    def trained(self, sim: Simulator) -> None:  # noqa: B027
        """Nothing to do."""


class SyncBarrier(Plain):
    """Sample a batch to its last episode, then train on it."""

    def wanted(self, sim: Simulator) -> int:
        """What the batch lacks."""
        if sim.is_training:
            return 0
        return self.groups_per_batch - len(self.done) - len(sim.groups)


class April(Plain):
    """Over-sample, train when a batch is full, go on with the rest (APRIL, arXiv 2509.18521)."""

    def __init__(self, groups_per_batch: int, over: float) -> None:
        """`over`: groups in flight at the start of a step, in batches."""
        super().__init__(groups_per_batch)
        self._over = over
        self._begun = -1

    def wanted(self, sim: Simulator) -> int:
        """At the start of a step: up to `over` batches; then replacements for dropped groups."""
        if sim.is_training:
            return 0
        have = len(sim.groups) + len(self.done)
        if self._begun < sim.version:
            self._begun = sim.version
            return max(int(self.groups_per_batch * self._over) - have, 0)
        return max(self.groups_per_batch - have, 0)


class AsyncCap(Plain):
    """Sample and train side by side with at most so many episodes in flight (AReaL's bound)."""

    def __init__(self, groups_per_batch: int, max_lag: int, in_flight_per_slot: float) -> None:
        """`in_flight_per_slot`: 1.0 is one episode per slot."""
        super().__init__(groups_per_batch)
        self._max_lag, self._per_slot = max_lag, in_flight_per_slot

    def wanted(self, sim: Simulator) -> int:
        """Up to the cap, and no further ahead than the lag allows."""
        slots = len(sim.engines) * sim.cluster.engine.num_slots
        cap = int(slots * self._per_slot / sim.group_size) - len(sim.groups)
        size = self.groups_per_batch
        ahead = (sim.version + sim.is_training) * size + len(self.done) + len(sim.groups)
        return max(min(cap, (self._max_lag + sim.version + 1) * size - ahead), 0)
