"""One server as the client sees it."""

import asyncio
from enum import StrEnum

from burnish.rollout.remote.dialect import ServerFacts
from burnish.rollout.remote.failures import RemoteFailure, RemoteProblem
from burnish.rollout.remote.wire import Wire


class ReplicaState(StrEnum):
    """Whether a replica takes requests."""

    READY = "ready"
    """It does."""
    UPDATING = "updating"
    """It is being given new weights: requests wait, or go elsewhere."""
    DOWN = "down"
    """It did not answer; it is looked at again and again."""
    OUTDATED = "outdated"
    """It answers, with weights that are not the current ones; they will be sent again."""


class Replica:
    """Owned by the client's loop."""

    def __init__(self, wire: Wire, facts: ServerFacts, version: int) -> None:
        """A server that has just been inspected and serves `version`."""
        self.wire, self.facts = wire, facts
        self.state = ReplicaState.READY
        self.num_inflight = 0
        self.version = version
        self.label = facts.label
        """What it must call its weights; None if it does not label them."""
        self.versions: dict[str, int] = {} if facts.label is None else {facts.label: version}
        """Of every label that it has served under."""
        self.scores: tuple[float, ...] | None = None
        """Of the probe, under the present weights."""
        self.idle = asyncio.Event()
        self.idle.set()

    @property
    def url(self) -> str:
        """Of the server."""
        return self.wire.url

    @property
    def load(self) -> int | None:
        """Requests in flight; None if it takes none."""
        return self.num_inflight if self.state is ReplicaState.READY else None

    def begin(self) -> None:
        """A request goes there."""
        self.num_inflight += 1
        self.idle.clear()

    def end(self) -> None:
        """One is over."""
        self.num_inflight -= 1
        if not self.num_inflight:
            self.idle.set()

    def serve(self, version: int, label: str | None) -> None:
        """It has new weights."""
        self.version, self.label = version, label
        if label is not None:
            self.versions[label] = version

    def version_of(self, label: str | None) -> int:
        """Of a label that came with tokens; without one, of the present weights.

        Raises:
            RemoteFailure: `outdated`: somebody else changed them.
        """
        if label is None:
            return self.version
        version = self.versions.get(label)
        if version is None:
            what = f"its tokens come from weights {label[:80]!r}, which were never sent there"
            raise RemoteFailure(RemoteProblem.OUTDATED, self.url, what)
        return version
