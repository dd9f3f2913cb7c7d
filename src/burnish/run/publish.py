"""Weights from trainer to engine, and the proof that they arrived.

After every publication the engine answers a fixed probe, and the trainer answers the same probe
from its own master weights. The two are compared; a mismatch stops the run, both values named.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, NamedTuple

from burnish.core.clock import Clock
from burnish.core.errors import ClassifiedFailure
from burnish.core.protocols import Engine
from burnish.core.records import Failure
from burnish.core.vocabulary import FailureKind, InFlight


class Publication(NamedTuple):
    """One delivery of weights."""

    version: int
    """What the engine now serves."""
    seconds: float
    """From snapshot to the answered probe."""
    canary_max_abs_diff: float
    """Largest difference between engine and trainer on the probe, nats."""


class WeightSource(NamedTuple):
    """What the publisher needs of a trainer. Both run off the event loop."""

    snapshot: Callable[[], Coroutine[Any, Any, Mapping[str, Any]]]
    """Weights to serve."""
    score: Callable[[Sequence[int]], Coroutine[Any, Any, Sequence[float]]]
    """Log-probs of the probe under the masters, computed as the engine would."""


class Publisher:
    """Publishes and checks. One instance per engine."""

    def __init__(
        self,
        engine: Engine,
        source: WeightSource,
        *,
        probe_ids: Sequence[int],
        tolerance: float,
        clock: Clock,
        inflight: InFlight = InFlight.KEEP,
    ) -> None:
        """Wire it.

        Args:
            engine: where the weights go.
            source: where they come from.
            probe_ids: the fixed question, at least two tokens.
            tolerance: allowed absolute difference per token, nats; 0.0 demands equal bits.
            clock: measures the delivery.
            inflight: what becomes of running generations.
        """
        assert len(probe_ids) >= 2
        self._engine, self._source, self._clock = engine, source, clock
        self._probe_ids, self._tolerance = tuple(probe_ids), tolerance
        self._inflight = inflight
        self._num_checks, self._worst = 0, 0.0

    async def publish(self, version: int) -> Publication:
        """Deliver the trainer's present weights as `version`.

        Raises:
            ClassifiedFailure: of kind `infra`, if the engine does not answer as the trainer does.
        """
        start_s = self._clock.now_s()
        state = await self._source.snapshot()
        await self._engine.update_weights(state, version, self._inflight)
        difference = await self._check(version)
        return Publication(version, self._clock.now_s() - start_s, difference)

    def summary(self) -> dict[str, Any]:
        """The canary over all publications, for the result."""
        return {
            "ok": self._num_checks > 0 and self._worst <= self._tolerance,
            "num_checks": self._num_checks,
            "max_abs_diff": self._worst,
            "tolerance": self._tolerance,
            "probe_tokens": len(self._probe_ids),
            "version": self._engine.weight_version,
        }

    async def _check(self, version: int) -> float:
        if self._engine.weight_version != version:
            served = self._engine.weight_version
            raise _mismatch(f"the engine serves version {served} after version {version} was sent")
        expected = await self._source.score(self._probe_ids)
        answered = await self._engine.score(self._probe_ids)
        assert len(expected) == len(answered) == len(self._probe_ids)
        gaps = [abs(a - b) for a, b in zip(expected, answered, strict=True)]
        worst = max(range(len(gaps)), key=gaps.__getitem__)
        if not gaps[worst] <= self._tolerance:
            raise _mismatch(
                f"version {version}: at probe token {worst} the trainer gives log-prob "
                f"{expected[worst]:.6f}, the engine {answered[worst]:.6f} "
                f"(allowed difference {self._tolerance:g})"
            )
        self._num_checks += 1
        self._worst = max(self._worst, gaps[worst])
        return gaps[worst]


def _mismatch(message: str) -> ClassifiedFailure:
    where = "canary of the served weights"
    return ClassifiedFailure(Failure(kind=FailureKind.INFRA, where=where, message=message))
