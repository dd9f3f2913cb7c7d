"""All breakers of a run, per (domain, image, kind of failure).

    closed --evidence--> open --cool-down over--> half-open --two clean groups--> closed
                          ^------------------a probe fails-------'

Failures of the policy are the policy's business and count as successes of the machinery. A failure
that an environment, a verifier or the data will only repeat counts double. A task that only fails
where others come through is poisoned, and given up; where nothing has come through yet, the first
task that fails speaks for all: waiting for a second one cost minutes.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from burnish.core.clock import Clock
from burnish.core.vocabulary import FailureKind
from burnish.schedule.breakers.base import (
    NOTHING,
    Attempt,
    BreakerConfig,
    BreakerKey,
    BreakerRow,
    BreakerState,
    Reaction,
)
from burnish.schedule.breakers.circuit import Circuit
from burnish.schedule.state_version import require_version

STATE_VERSION = 3

REPEATS = frozenset({FailureKind.ENVIRONMENT, FailureKind.VERIFIER, FailureKind.DATA})
"""Kinds that a retry would only see again."""
_REPEATS_WEIGHT = 2.0
# Cool-downs differ by up to this part, so that what broke together does not come back together.
_JITTER = 0.2
# Tasks remembered as having come through, for each domain and image: more than are in flight.
_MAX_ANSWERED = 64


class Breakers:
    """Ask `blocked` before a dispatch, say `dispatched`, report every attempt and every group."""

    def __init__(self, config: BreakerConfig, clock: Clock) -> None:
        """All closed."""
        self._config, self._clock = config, clock
        self._circuits: dict[BreakerKey, Circuit] = {}
        self._images: dict[str, set[str]] = defaultdict(set)
        self._of: dict[tuple[str, str], list[Circuit]] = defaultdict(list)
        self._probing: dict[str, tuple[str, str]] = {}
        # Values are unused: a set that keeps its order.
        self._answered: dict[tuple[str, str], dict[str, None]] = defaultdict(dict)

    def refuses(self, domain: str, image: str = "") -> bool:
        """Whether a group of that domain and image would be turned away now."""
        now = self._clock.now_s()
        return any(c.refuses(now) for c in self._of.get((domain, image), ()))

    def blocked(self) -> frozenset[str]:
        """Domains all of whose images are refused now; takes nothing."""
        now = self._clock.now_s()
        domains = {key.domain for key, c in self._circuits.items() if c.refuses(now)}
        return frozenset(
            d for d in domains if all(self.refuses(d, image) for image in self._images[d])
        )

    def dispatched(self, group_id: str, domain: str, image: str = "") -> bool:
        """A group starts; behind a half-open breaker it is the probe. True if it is one."""
        now = self._clock.now_s()
        for circuit in self._of.get((domain, image), ()):
            if circuit.state(now) is BreakerState.HALF_OPEN:
                circuit.probe_s = now
                self._probing[group_id] = (domain, image)
        return group_id in self._probing

    def attempt(self, ended: Attempt) -> Reaction:
        """An attempt ended, well or badly."""
        place = (ended.domain, ended.image)
        self._images[ended.domain].add(ended.image)
        kind = None if ended.failure is FailureKind.POLICY else ended.failure
        circuits = self._of.get(place, ())
        answered = self._answered[place]
        if kind is None:
            answered.pop(ended.task, None)
            answered[ended.task] = None
            if len(answered) > _MAX_ANSWERED:
                del answered[next(iter(answered))]
            for circuit in circuits:
                circuit.clean(ended.task)
            return NOTHING
        now = self._clock.now_s()
        key = BreakerKey(*place, kind)
        circuit = self._circuit(key)
        weight = _REPEATS_WEIGHT if kind in REPEATS else 1.0
        others = len(answered) > (ended.task in answered)
        opened = circuit.failed(ended.task, now, weight=weight, others_answer=others)
        if opened:
            self._spread(key, circuit)
        # A probe that failed in another way than expected is no sign of health either.
        for other in self._of[place]:
            if other is not circuit:
                other.probe_failed(now)
        poisoned = others and ended.task not in answered
        abandon = poisoned and circuit.task_is_to_blame(ended.task)
        return Reaction((key,) if opened else (), abandon)

    def group_done(self, group_id: str, *, clean: bool) -> None:
        """All attempts of a group are over; `clean` if most of its samples were judged."""
        place = self._probing.pop(group_id, None)
        if place is None:
            return
        now = self._clock.now_s()
        for circuit in self._of[place]:
            if clean:
                circuit.probe_passed()
            elif circuit.state(now) is BreakerState.HALF_OPEN:
                circuit.probe_failed(now)

    def table(self) -> tuple[BreakerRow, ...]:
        """All breakers with a failure to their name."""
        now = self._clock.now_s()
        return tuple(
            BreakerRow(
                domain=key.domain,
                image=key.image,
                kind=key.kind,
                state=c.state(now),
                evidence=c.evidence,
                num_failures=c.num_failures,
                num_opened=c.num_opened,
                retry_in_s=max(c.opened_s + c.cooldown_s - now, 0.0) if c.is_open else 0.0,
            )
            for key, c in self._circuits.items()
        )

    def state(self) -> dict[str, Any]:
        """All that `from_state` needs, as JSON values."""
        now = self._clock.now_s()
        return {
            "version": STATE_VERSION,
            "circuits": [[*map(str, key), c.saved(now)] for key, c in self._circuits.items()],
            "images": {domain: sorted(images) for domain, images in self._images.items()},
            "answered": [[*place, list(tasks)] for place, tasks in self._answered.items()],
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any], config: BreakerConfig, clock: Clock) -> Breakers:
        """Continue where `state` was taken.

        Raises:
            UserError: if another version of the program wrote it.
        """
        require_version(state, STATE_VERSION, "breaker state")
        breakers, now = cls(config, clock), clock.now_s()
        for domain, image, kind, saved in state["circuits"]:
            breakers._circuit(BreakerKey(domain, image, FailureKind(kind))).load(saved, now)
        for domain, images in state["images"].items():
            breakers._images[domain] = set(images)
        for domain, image, tasks in state["answered"]:
            breakers._answered[domain, image] = dict.fromkeys(tasks)
        return breakers

    def _circuit(self, key: BreakerKey) -> Circuit:
        circuit = self._circuits.get(key)
        if circuit is None:
            circuit = self._circuits[key] = Circuit(self._config)
            self._of[key.domain, key.image].append(circuit)
        return circuit

    def _spread(self, key: BreakerKey, circuit: Circuit) -> None:
        """Lengthen or shorten a cool-down by a part that only the key and the count decide."""
        text = f"{key}/{circuit.num_opened}".encode()
        fraction = int.from_bytes(hashlib.blake2b(text, digest_size=4).digest()) / 2**32
        circuit.cooldown_s *= 1.0 + _JITTER * (2.0 * fraction - 1.0)
