"""The machines that are simulated, and what a system under comparison decides."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from burnish.plan.pipeline.engines import EngineModel
from burnish.plan.pipeline.episode import SimEpisode, SimGroup

if TYPE_CHECKING:
    from burnish.plan.pipeline.simulator import Simulator


class ClusterModel(NamedTuple):
    """The machines."""

    num_accelerators: int = 16
    """All of them; one engine each."""
    train_ratio: float = 0.0
    """Part that only trains; 0.0: all sample, then all train."""
    engine: EngineModel = EngineModel()
    """One engine."""
    train_tokens_per_s: float = 1625.0
    """Of one accelerator."""
    publish_s: float = 1.0
    """New weights to the engines; three times that where both share accelerators."""
    prefill_tokens_per_s: float = 9600.0
    """Of one engine, where keys and values are computed again after it was a trainer; ten times its
    decode rate. 0.0 makes that free."""

    @property
    def num_engines(self) -> int:
        """Accelerators that sample."""
        return round(self.num_accelerators * (1.0 - self.train_ratio))

    @property
    def most_tokens_per_s(self) -> float:
        """Trained tokens per second if no accelerator ever waited and no token were lost."""
        slots = self.engine.num_slots
        sampled = slots * self.engine.rate(slots)
        return self.num_accelerators / (1.0 / sampled + 1.0 / self.train_tokens_per_s)

    @property
    def num_trainers(self) -> int:
        """Accelerators that train."""
        shared = self.train_ratio == 0.0
        return self.num_accelerators if shared else self.num_accelerators - self.num_engines


class System(Protocol):
    """What is to be compared."""

    def fill(self, sim: Simulator) -> None:
        """Start groups: called whenever something ended."""
        ...

    def choose(self, sim: Simulator, queue: list[SimEpisode]) -> int:
        """Place in the queue of who gets the next free slot."""
        ...

    def failed(self, sim: Simulator, episode: SimEpisode) -> bool:
        """An attempt failed; True to try again. May drop groups."""
        ...

    def judged(self, sim: Simulator, episode: SimEpisode) -> None:
        """An attempt succeeded."""
        ...

    def ended(self, sim: Simulator, group: SimGroup, *, trainable: bool) -> None:
        """A group is complete, or was dropped."""
        ...

    def next_batch(self, sim: Simulator) -> list[SimGroup] | None:
        """Groups to train on now, or None to wait."""
        ...

    def trained(self, sim: Simulator) -> None:
        """A version was published."""
        ...
