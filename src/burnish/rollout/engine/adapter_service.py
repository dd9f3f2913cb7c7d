"""Adapters coming and going while requests run."""

from collections.abc import Sequence as Seq

from burnish.core.vocabulary import InFlight, StopReason
from burnish.model.lora import LayerDeltas
from burnish.rollout.engine.adapters import AdapterSet, ServedAdapter
from burnish.rollout.engine.argument_types import member
from burnish.rollout.engine.inflight import everyone, settle
from burnish.rollout.engine.scheduler import Scheduler
from burnish.rollout.engine.sequence import Sequence
from burnish.rollout.engine.stepper import Ended


class Adapters:
    """The adapters of one engine; changed between two steps only."""

    def __init__(self, known: AdapterSet, scheduler: Scheduler) -> None:
        """`known` is what requests are checked against."""
        self._known, self._scheduler = known, scheduler

    @property
    def names(self) -> tuple[str, ...]:
        """Those that requests may use, sorted."""
        return self._known.names

    def get(self, name: str | None) -> ServedAdapter | None:
        """None for no name.

        Raises:
            UserError: if it is not known.
        """
        return self._known.get(name)

    def add(
        self,
        name: str,
        layers: Seq[LayerDeltas],
        version: int,
        inflight: InFlight = InFlight.KEEP,
    ) -> Ended:
        """Add an adapter, or replace its weights; returns what `inflight` ended.

        Raises:
            UserError: if the name is empty, or the version not newer than its last.
        """
        inflight = member(InFlight, inflight)
        old = self._known.get(name) if name in self.names else None
        new = self._known.put(name, layers, version)
        affected = self._users(name)
        ended = settle(self._scheduler, affected, inflight)
        for sequence in affected:
            sequence.adapter, sequence.match_from = new, None
        if old is not None:
            self._scheduler.memory.rename(old.key, new.key)
        return [*ended]

    def remove(self, name: str) -> Ended:
        """Forget an adapter and its pins; returns the requests that this ended.

        Raises:
            UserError: if it is not known.
        """
        gone = self._known.get(name)
        self._known.remove(name)
        ended: Ended = []
        for sequence in self._users(name):
            self._scheduler.remove(sequence)
            ended.append((sequence, sequence.result(StopReason.ABORTED)))
        if gone is not None:
            self._scheduler.memory.unpin_all(gone.key)
        return ended

    def _users(self, adapter: str) -> list[Sequence]:
        return [s for s in everyone(self._scheduler) if s.request.adapter == adapter]
