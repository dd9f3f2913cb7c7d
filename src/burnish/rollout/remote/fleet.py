"""Replicas that answer as one engine. Everything here runs in one loop, without locks but one.

    request --> pick (session, load) --> replica --chunks--> tally --> deltas
                  ^                        | fails
                  '---- the remainder -----'      tokens stay, a new replica continues them

    look after, every few seconds:   down -> well? -> weights right? -> ready
                                                        '-> outdated -> sent again -> ready

| waits | for | unblocked by |
|---|---|---|
| a request | a replica that takes it | the end of an update, a replica that is well again |
| an update | the one before it | the lock |
| sleep | requests in flight | their ends |
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import aclosing
from typing import Any

from burnish.core.clock import Clock
from burnish.core.errors import ClassifiedFailure, UserError
from burnish.core.records import GenerateRequest, GenerationDelta
from burnish.core.vocabulary import SleepLevel, StopReason
from burnish.rollout.remote.adapters import RemoteAdapter, RemoteAdapters
from burnish.rollout.remote.config import RemoteConfig
from burnish.rollout.remote.counters import Counters
from burnish.rollout.remote.delivery import deliver, score_fresh
from burnish.rollout.remote.dialect import Ask, Delivery, Dialect, LogprobScope, ServerFacts
from burnish.rollout.remote.failures import MOVABLE, RemoteFailure, RemoteProblem
from burnish.rollout.remote.intake import Intake
from burnish.rollout.remote.replica import Replica, ReplicaState
from burnish.rollout.remote.router import Router
from burnish.rollout.remote.scope import measure_scope, weakest
from burnish.rollout.remote.tally import Tally
from burnish.rollout.remote.wire import Wire

_LOG = logging.getLogger(__name__)
_BLAMED = frozenset({RemoteProblem.UNREACHABLE, RemoteProblem.LOST, RemoteProblem.TIMEOUT})
_BUSY_PAUSE_S = 0.2


class Fleet:
    """Talks to all servers."""

    def __init__(
        self,
        config: RemoteConfig,
        dialect: Dialect,
        clock: Clock,
        *,
        version: int,
        salt: Callable[[int], str],
    ) -> None:
        """Nothing is sent yet.

        Raises:
            UserError: a URL, the token or the CA file cannot be used.
        """
        if not config.urls:
            raise UserError(
                "engine.remote.urls is empty.", fix='give the servers: urls = ["http://host:8000"].'
            )
        self._config, self._dialect, self._clock, self._salt = config, dialect, clock, salt
        self._wires = [Wire(url, config) for url in config.urls]
        if len({wire.url for wire in self._wires}) != len(self._wires):
            raise UserError("engine.remote.urls names a server twice.", fix="name each once.")
        self.version = version
        self.scope = LogprobScope.RAW
        self.replicas: list[Replica] = []
        self.counters = Counters()
        self.adapters = RemoteAdapters(dialect, config.update_timeout_s)
        self._router = Router()
        self._changed = asyncio.Event()
        self._updating = asyncio.Lock()
        self._awake = asyncio.Event()
        self._awake.set()
        self._current: Delivery | None = None
        self._care: asyncio.Task[None] | None = None
        self._deliveries: set[asyncio.Task[None]] = set()

    async def connect(self) -> None:
        """Ask every server what it is; all must answer, and alike.

        Raises:
            UserError: one is of another kind, or serves another model.
            RemoteFailure: one cannot be reached.
        """
        inspect = [self._dialect.inspect(wire, self._config.model) for wire in self._wires]
        found = await asyncio.gather(*inspect)
        self.replicas = [
            Replica(wire, facts, self.version)
            for wire, facts in zip(self._wires, found, strict=True)
        ]
        self.adapters.find(set.intersection(*(set(facts.adapters) for facts in found)))
        salt = self._salt(self.version)
        self.scope = weakest([await measure_scope(self._dialect, r, salt) for r in self.replicas])
        self._care = asyncio.get_running_loop().create_task(self._look_after())

    @property
    def facts(self) -> list[ServerFacts]:
        """Of all servers."""
        return [replica.facts for replica in self.replicas]

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[GenerationDelta, None]:
        """Sample; the last delta carries the whole answer.

        Raises:
            UserError: a server refuses the request as wrong.
            RemoteFailure: it failed, more often than it may move.
        """
        tally = Tally(request, self._clock.now_s())
        num_moves = 0
        while True:
            await self._awake.wait()
            replica = await self._pick(request)
            if not tally.num_tokens:
                tally.queued_s = self._clock.now_s() - tally.arrived_s
                self.counters.queue.add(tally.queued_s)
            try:
                async with aclosing(self._attempt(replica, tally)) as deltas:
                    async for delta in deltas:
                        yield delta
                return
            except RemoteFailure as error:
                self._blame(replica, error)
                num_moves += 1
                spent = tally.num_tokens >= request.params.max_tokens
                if (
                    error.problem not in MOVABLE
                    or num_moves > self._config.max_moves
                    or not tally.can_move
                    or spent
                ):
                    self.counters.num_failures += 1
                    raise
                self.counters.num_moves += 1
                if error.problem is RemoteProblem.OVERLOADED:
                    await asyncio.sleep(_BUSY_PAUSE_S * num_moves)

    async def score(self, token_ids: Sequence[int]) -> tuple[float, ...]:
        """Every replica is asked, and all must agree.

        Raises:
            RemoteFailure: nobody can answer, or they disagree.
        """
        await self._awake.wait()
        ready = await self._ready()
        answers = await asyncio.gather(
            *(score_fresh(self._dialect, replica, token_ids) for replica in ready)
        )
        first = answers[0]
        for replica, scores in zip(ready[1:], answers[1:], strict=True):
            gap = max((abs(a - b) for a, b in zip(first, scores, strict=True)), default=0.0)
            if not gap <= self._config.agreement_nats:
                what = (
                    f"its log-probs are {gap:.3f} nats from those of {ready[0].url} "
                    f"(allowed {self._config.agreement_nats:g})"
                )
                raise RemoteFailure(RemoteProblem.DISAGREE, replica.url, what)
        return first

    async def update(self, delivery: Delivery, version: int) -> None:
        """Give all replicas new weights. One that fails serves nothing until it has them.

        Raises:
            UserError: a server refuses the weights.
            RemoteFailure: no replica has them.
        """
        await self._to_the_end(self._update(delivery, version))

    async def load_adapter(self, adapter: RemoteAdapter) -> None:
        """Give all replicas an adapter; raises as `update` does."""
        await self._to_the_end(self._load_adapter(adapter))

    async def remove_adapter(self, name: str) -> None:
        """Forget an adapter that was loaded from here."""
        async with self._updating:
            await self.adapters.withdraw(self._live, self.adapters.take(name))

    async def restore_adapters(self) -> None:
        """Load all adapters again: the servers have given their memory back."""
        for replica in self._live:
            await self.adapters.restore(replica, everything=True)

    async def pause(self) -> None:
        """Stand still everywhere; requests in flight stay there."""
        await self._everywhere(self._dialect.pause)

    async def resume(self) -> None:
        """Go on."""
        await self._everywhere(self._dialect.resume)

    async def sleep(self, level: SleepLevel) -> None:
        """Hold new requests back, let the running ones end, give memory back."""
        self._awake.clear()
        for replica in self.replicas:
            await replica.idle.wait()
        await self._everywhere(lambda wire: self._dialect.sleep(wire, level))

    async def wake(self, level: SleepLevel) -> None:
        """Take memory again. `rouse` lets requests in."""
        await self._everywhere(lambda wire: self._dialect.wake(wire, level))

    async def rouse(self) -> None:
        """Let held requests go out."""
        self._awake.set()

    async def close(self) -> None:
        """Hang up: what runs on the servers is ended by that."""
        if self._care is not None:
            self._care.cancel()
            await asyncio.gather(self._care, return_exceptions=True)
        await self.adapters.leave(self._live, self._config.connect_timeout_s)
        if self._deliveries:
            await asyncio.wait(self._deliveries, timeout=self._config.update_timeout_s)
        await asyncio.gather(*(wire.close() for wire in self._wires))

    @property
    def _live(self) -> list[Replica]:
        return [r for r in self.replicas if r.state is not ReplicaState.DOWN]

    async def _attempt(
        self, replica: Replica, tally: Tally
    ) -> AsyncGenerator[GenerationDelta, None]:
        """The rest of a request on one replica."""
        request, adapter = tally.request, self.adapters.get(tally.request.adapter)
        version = -1 if adapter is None else adapter.version
        replica.begin()
        self.counters.num_requests += 1
        try:
            if request.prompt_logprobs and not tally.prompt_logprobs:
                scores = await score_fresh(self._dialect, replica, request.prompt_ids)
                tally.prompt_logprobs = scores
            if request.params.max_tokens == 0:
                yield tally.final(StopReason.LENGTH)
                return
            salt, name = self._salt(replica.version), adapter and adapter.served
            ask = Ask(
                tally.remainder(),
                replica.facts.model,
                salt if name is None else f"{salt}-{name}",
                name,
            )
            intake = Intake(replica, tally, self.counters, version)
            async with aclosing(self._dialect.generate(replica.wire, ask)) as chunks:
                async for chunk in chunks:
                    delta = intake.take(chunk, self._clock.now_s())
                    if chunk.end is None:
                        yield delta
                        continue
                    intake.settle(chunk)
                    yield tally.final(chunk.end.reason, len(delta.token_ids))
                    return
        finally:
            replica.end()

    async def _pick(self, request: GenerateRequest) -> Replica:
        while True:
            loads = [replica.load for replica in self.replicas]
            index = self._router.pick(loads, request.session_id)
            if index is not None:
                return self.replicas[index]
            await self._wait_for_somebody()

    async def _ready(self) -> list[Replica]:
        while not (ready := [r for r in self.replicas if r.state is ReplicaState.READY]):
            await self._wait_for_somebody()
        return ready

    async def _wait_for_somebody(self) -> None:
        """Only for what is known to end: an update. A dead fleet is told at once."""
        if not any(r.state is ReplicaState.UPDATING for r in self.replicas):
            raise self._nobody()
        self._changed.clear()
        await self._changed.wait()

    def _nobody(self) -> RemoteFailure:
        states = ", ".join(f"{r.url} {r.state}" for r in self.replicas[1:])
        first = self.replicas[0]
        what = f"{first.state}" + (f"; {states}" if states else "")
        return RemoteFailure(RemoteProblem.NOBODY, first.url, what)

    def _blame(self, replica: Replica, error: RemoteFailure) -> None:
        if error.problem is RemoteProblem.OUTDATED:
            self._set(replica, ReplicaState.OUTDATED)
        elif error.problem in _BLAMED:
            self._set(replica, ReplicaState.DOWN)

    def _set(self, replica: Replica, state: ReplicaState) -> None:
        if replica.state is not state:
            _LOG.info("%s is %s", replica.url, state)
        replica.state = state
        self._changed.set()

    async def _to_the_end(self, work: Coroutine[Any, Any, None]) -> None:
        """Whoever waits may leave: a server that was paused for new weights must be resumed."""
        task = asyncio.get_running_loop().create_task(work)
        self._deliveries.add(task)
        task.add_done_callback(self._deliveries.discard)
        # A failure that nobody waits for any more is in the log already.
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        await asyncio.shield(task)

    async def _update(self, delivery: Delivery, version: int) -> None:
        async with self._updating:
            targets = self._live
            results = await asyncio.gather(
                *(self._deliver(replica, delivery, version) for replica in targets),
                return_exceptions=True,
            )
            errors = [error for error in results if isinstance(error, BaseException)]
            if len(errors) == len(targets):
                raise errors[0] if errors else self._nobody()
            self._current, self.version = delivery, version
            for replica in self.replicas:
                if replica.version != version and replica.state is ReplicaState.READY:
                    self._set(replica, ReplicaState.OUTDATED)
            for error in errors:
                _LOG.warning("a replica has not got version %d: %s", version, error)

    async def _deliver(self, replica: Replica, delivery: Delivery, version: int) -> None:
        known = self._current is not None and replica.state is ReplicaState.READY
        was_digest = self._current.digest if self._current is not None and known else None
        self._set(replica, ReplicaState.UPDATING)
        try:
            await deliver(
                self._dialect,
                replica,
                delivery,
                version=version,
                was_digest=was_digest,
                timeout_s=self._config.update_timeout_s,
            )
        except BaseException as error:
            down = isinstance(error, RemoteFailure) and error.problem in _BLAMED
            self._set(replica, ReplicaState.DOWN if down else ReplicaState.OUTDATED)
            raise
        self._set(replica, ReplicaState.READY)

    async def _load_adapter(self, adapter: RemoteAdapter) -> None:
        async with self._updating:
            if not self._live:
                raise self._nobody()
            for replica in await self.adapters.load(self._live, adapter):
                self._set(replica, ReplicaState.DOWN)

    async def _everywhere(self, action: Callable[[Wire], Coroutine[Any, Any, None]]) -> None:
        """Do the same on all replicas; one that fails is left alone from then on."""
        if not self._live:
            raise self._nobody()
        for replica in self._live:
            try:
                await action(replica.wire)
            except RemoteFailure as error:
                self._blame(replica, error)
                raise

    async def _look_after(self) -> None:
        while True:
            await asyncio.sleep(self._config.health_interval_s)
            for replica in self.replicas:
                if replica.state is not ReplicaState.UPDATING and self._awake.is_set():
                    await self._examine(replica)

    async def _examine(self, replica: Replica) -> None:
        limit_s = self._config.connect_timeout_s
        try:
            await self._dialect.is_healthy(replica.wire, limit_s)
            self.counters.note(replica.url, await self._dialect.counts(replica.wire, limit_s))
            await self._to_the_end(self._reconcile(replica))
        except (ClassifiedFailure, UserError) as error:
            _LOG.info("%s: %s", replica.url, error)
            self.counters.note(replica.url, None)
            if replica.state is not ReplicaState.UPDATING:
                self._set(replica, ReplicaState.DOWN)

    async def _reconcile(self, replica: Replica) -> None:
        """Let a healthy replica serve, once it has the current weights."""
        # The label is read inside of the lock: during an update it would be the old one.
        async with self._updating:
            label = await self._dialect.label(replica.wire, self._config.connect_timeout_s)
            is_right = label == replica.label and replica.version == self.version
            has_lost = replica.state is ReplicaState.OUTDATED and self._current is not None
            try:
                if not is_right or has_lost:
                    self._set(replica, ReplicaState.OUTDATED)
                    if self._current is None:
                        return
                    replica.scores = None
                    await self._deliver(replica, self._current, self.version)
                await self.adapters.restore(replica)
                self._set(replica, ReplicaState.READY)
            except (ClassifiedFailure, UserError) as error:
                _LOG.warning("%s does not take its weights: %s", replica.url, error)
                if replica.state is ReplicaState.READY:
                    self._set(replica, ReplicaState.DOWN)
