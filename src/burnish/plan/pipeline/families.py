"""The pipeline's scenarios for `burnish simulate`: systems instead of policies."""

from __future__ import annotations

from typing import NamedTuple

from burnish.plan.pipeline.contract import ClusterModel, System
from burnish.plan.pipeline.flow_system import Flow
from burnish.plan.pipeline.simulator import Simulator
from burnish.plan.pipeline.systems import April, AsyncCap, SyncBarrier
from burnish.plan.pipeline.workload import draw_workload
from burnish.plan.scenario import Curve, Tier, Trial

_GROUP_SIZE = 16
_MAX_LAG = 4
# What is left to trainers, so that neither side waits for the other in the mixed workload.
_TRAIN_RATIO = 0.37
_SYSTEMS = ("flow", "flow_without_breakers", "sync", "april_2", "april_3", "async")


class _Size(NamedTuple):
    """Of a tier."""

    num_domains: int
    num_accelerators: int
    num_steps: int


# Fewer accelerators than the tiers name: every segment of every episode is an event of its own.
_SIZES = {Tier.S: _Size(50, 16, 4), Tier.M: _Size(300, 32, 8), Tier.L: _Size(1000, 64, 8)}


class PipelineScenario:
    """One kind of workload."""

    def __init__(
        self,
        name: str,
        summary: str,
        *,
        tail: float = 1.0,
        skew: float = 1.0,
        broken_ratio: float = 0.12,
    ) -> None:
        """See `draw_workload`."""
        self.name, self.summary = name, summary
        self._tail, self._skew, self._broken_ratio = tail, skew, broken_ratio

    def policies(self) -> tuple[str, ...]:
        """Systems; the first is that of the real run."""
        return _SYSTEMS

    def run(self, policy: str, tier: Tier, seed: int) -> Trial:
        """Simulate one system."""
        size = _SIZES[tier]
        batch = 4 * size.num_accelerators
        system, cluster = _build(policy, batch, size.num_accelerators)
        workload = draw_workload(
            size.num_domains,
            seed,
            tail=self._tail,
            skew=self._skew,
            broken_ratio=self._broken_ratio,
        )
        sim = Simulator(workload, cluster, system, seed=seed, group_size=_GROUP_SIZE)
        result = sim.run(size.num_steps, 2)
        metrics = {
            name: float(value)
            for name, value in result._asdict().items()
            if isinstance(value, float) or name == "num_failed"
        }
        waits = sorted(sim.waits_s)
        points = tuple((100.0 * i / 20, waits[i * (len(waits) - 1) // 20]) for i in range(21))
        return Trial(metrics, (Curve("wait for a slot, s", "percentile", points),))


def _build(name: str, batch: int, num_accelerators: int) -> tuple[System, ClusterModel]:
    shared = ClusterModel(num_accelerators=num_accelerators)
    if name == "sync":
        return SyncBarrier(batch), shared
    if name.startswith("april"):
        return April(batch, float(name.rpartition("_")[2])), shared
    split = shared._replace(train_ratio=_TRAIN_RATIO)
    if name == "async":
        return AsyncCap(batch, _MAX_LAG, 1.0), split
    return Flow(batch, _MAX_LAG, with_breakers=name == "flow"), split


SCENARIOS = (
    PipelineScenario("pipeline", "Rollout and training: agents, tails and a few broken images."),
    PipelineScenario("pipeline_tail", "The same with a third more spread in lengths.", tail=1.3),
    PipelineScenario("pipeline_outages", "A third of the agents broken.", broken_ratio=0.35),
)
