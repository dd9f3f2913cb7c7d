"""Engines with continuous batching as processor sharing.

A sequence in a batch of b runs at speed / (1 + b / half) tokens per second: throughput rises with b
and saturates. All sequences of an engine advance together, so one number per engine, the tokens
that each of them has made since the start, orders their ends.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from burnish.plan.pipeline.episode import SimEpisode


class EngineModel(NamedTuple):
    """What one engine can do."""

    num_slots: int = 32
    """Sequences decoded together."""
    speed: float = 70.0
    """Tokens per second of a lone sequence."""
    half: float = 24.0
    """Batch at which that is halved."""

    def rate(self, batch: int) -> float:
        """Tokens per second of each of `batch` sequences."""
        return self.speed / (1.0 + batch / self.half)


class SimEngine:
    """One engine. Call `advance` before anything else happens to it."""

    def __init__(self, model: EngineModel) -> None:
        """Idle."""
        self.model = model
        self.heap: list[tuple[float, int, SimEpisode]] = []
        self.made = 0.0
        self.now_s = 0.0
        self.ticket = 0
        self.busy_s = 0.0
        self.load_s = 0.0
        self.frozen = False

    @property
    def has_room(self) -> bool:
        """Whether a slot is free."""
        return len(self.heap) < self.model.num_slots

    def advance(self, now_s: float) -> None:
        """Let time pass."""
        elapsed, batch = now_s - self.now_s, len(self.heap)
        self.now_s = now_s
        if batch and elapsed > 0.0 and not self.frozen:
            self.made += elapsed * self.model.rate(batch)
            self.busy_s += elapsed
            self.load_s += elapsed * batch / self.model.num_slots

    def add(self, episode: SimEpisode, number: int) -> None:
        """Start a segment; `number` breaks ties."""
        heapq.heappush(self.heap, (self.made + episode.segment, number, episode))

    def remove(self, episode: SimEpisode) -> float:
        """Abort a segment; tokens that were made of it."""
        for place, (end, _, other) in enumerate(self.heap):
            if other is episode:
                self.heap[place] = self.heap[-1]
                self.heap.pop()
                heapq.heapify(self.heap)
                return max(episode.segment - (end - self.made), 0.0)
        raise AssertionError("not on this engine")

    def ended(self) -> list[SimEpisode]:
        """Take what is finished."""
        done = []
        while self.heap and self.heap[0][0] <= self.made + 1e-6:
            done.append(heapq.heappop(self.heap)[2])
        return done

    @property
    def load(self) -> int:
        """Sequences on it."""
        return len(self.heap)

    def next_end_s(self) -> float | None:
        """Seconds until the first of its sequences ends; None if idle or frozen."""
        if not self.heap or self.frozen:
            return None
        return max((self.heap[0][0] - self.made) / self.model.rate(len(self.heap)), 0.0)


class Fleet:
    """All engines, and which of them has the fewest sequences.

    Say `changed` whenever one has more or fewer, or thaws: with a thousand engines nobody can ask
    all of them for every segment.
    """

    def __init__(self, model: EngineModel, num_engines: int) -> None:
        """All idle."""
        self.engines = [SimEngine(model) for _ in range(num_engines)]
        self.num_running = 0
        """Sequences on all engines."""
        self._places = {engine: place for place, engine in enumerate(self.engines)}
        self._loads = [0] * num_engines
        # (load, place) of every engine that may be used, and others that are out of date.
        self._order = [(0, place) for place in range(num_engines)]

    def changed(self, engine: SimEngine) -> None:
        """An engine has more or fewer sequences, or thawed."""
        place, load = self._places[engine], engine.load
        self.num_running += load - self._loads[place]
        self._loads[place] = load
        heapq.heappush(self._order, (load, place))
        if len(self._order) > 8 * len(self.engines):
            self._order = [(load, place) for place, load in enumerate(self._loads)]
            heapq.heapify(self._order)

    def idlest(self) -> SimEngine | None:
        """The first of those with the fewest sequences; None if all are full or frozen."""
        while self._order:
            load, place = self._order[0]
            engine = self.engines[place]
            if load == self._loads[place] and not engine.frozen:
                return engine if engine.has_room else None
            heapq.heappop(self._order)
        return None
