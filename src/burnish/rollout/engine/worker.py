"""The engine behind the `core.protocols.Engine` protocol: a thread around `EngineCore`.

    any event loop --generate/score/update_weights--> inbox --> thread: calls, aborts, admit, step
          ^                                                        |
          '----------- future, set through its own loop -----------'

The thread alone touches the core. Weight updates and scores run between two steps, or with a
barrier between two waves. If a step raises, everything pending fails with one classified failure
and the worker refuses further work: nothing hangs, and doubtful state never answers.
"""

import asyncio
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from threading import Condition, Thread
from typing import Any

import torch
from torch import Tensor

from burnish.core.clock import Clock, SystemClock
from burnish.core.errors import ClassifiedFailure, UserError, boundary
from burnish.core.records import Failure, GenerateRequest, Generation
from burnish.core.vocabulary import FailureKind, StopReason
from burnish.model.config import ModelConfig
from burnish.rollout.engine.barrier import Barrier
from burnish.rollout.engine.engine import CoreLimits, EngineCore
from burnish.rollout.engine.reply import Reply
from burnish.rollout.engine.sequence import Sequence
from burnish.rollout.engine.stats import EngineStats

_WHERE = "rollout.engine"


class _Ticket:
    """A request from its arrival to its answer."""

    def __init__(self, request: GenerateRequest, reply: Reply[Generation]) -> None:
        self.request, self.reply = request, reply
        self.sequence: Sequence | None = None
        self.is_aborted = False


class _Call:
    """Something to run on the thread between two steps."""

    def __init__(self, run: Callable[[], Any], reply: Reply[Any]) -> None:
        self.run, self.reply = run, reply


class EngineWorker:
    """Runs an engine on its own thread. Every method may be called from any thread."""

    def __init__(
        self,
        config: ModelConfig,
        state: Mapping[str, Tensor],
        *,
        version: int = 0,
        dtype: torch.dtype = torch.bfloat16,
        limits: CoreLimits | None = None,
        num_threads: int | None = None,
        barrier: Barrier | None = None,
        max_outstanding: int = 4096,
        clock: Clock | None = None,
    ) -> None:
        """Copy the weights and start the thread.

        Args:
            config: architecture.
            state: named as `Decoder.state_dict()`; copied.
            version: weight version of `state`.
            dtype: of weights and cache; the head is always fp32.
            limits: sizes.
            num_threads: torch threads for this thread's operators; None leaves torch's default.
            barrier: makes batches independent of the wall clock, see `Barrier`.
            max_outstanding: requests in flight beyond this many are refused.
            clock: for the busy ratio.

        Raises:
            UserError: if the weights do not fit the configuration.
        """
        self._core = EngineCore(config, state, version=version, dtype=dtype, limits=limits)
        self._num_threads, self._barrier = num_threads, barrier
        self._max_outstanding = max_outstanding
        self._clock = clock or SystemClock()
        self._started_s, self._busy_s = self._clock.now_s(), 0.0
        self._wake = Condition()
        self._inbox: list[_Ticket] = []
        self._calls: list[_Call] = []
        self._aborted: list[_Ticket] = []
        self._outstanding: dict[str, _Ticket] = {}
        self._active: dict[Sequence, _Ticket] = {}
        self._failure: Failure | None = None
        self._is_closing = False
        self._quiet_seen = 0
        if barrier is not None:
            barrier.subscribe(self._notify)
        self._thread = Thread(target=self._run, name="burnish-engine", daemon=True)
        self._thread.start()

    @property
    def weight_version(self) -> int:
        """Version of the weights that answer now."""
        return self._core.weight_version

    async def generate(self, request: GenerateRequest) -> Generation:
        """Sample one continuation; cancelling the caller aborts the request.

        Raises:
            UserError: if the request could never run.
            ClassifiedFailure: of kind `infra`, if the engine failed, is closed or is overloaded.
        """
        self._core.validate(request)
        ticket = _Ticket(request, Reply(asyncio.get_running_loop()))
        self._submit(ticket)
        try:
            return await ticket.reply.future
        except asyncio.CancelledError:
            self._abort(ticket)
            raise

    async def score(self, token_ids: Seq[int]) -> tuple[float, ...]:
        """Log-prob of each token given those before it, temperature 1; the first is 0.0.

        Raises:
            UserError: if the tokens do not fit the model.
            ClassifiedFailure: of kind `infra`, if the engine failed or is closed.
        """
        ids = tuple(token_ids)
        scores: tuple[float, ...] = await self._call(lambda: self._core.score(ids))
        return scores

    async def update_weights(self, state: Mapping[str, Any], version: int) -> None:
        """Swap weights between two steps; running requests go on over their old cache.

        `state` must not change until this returns.

        Raises:
            UserError: if the state cannot be served; the old weights stay.
            ClassifiedFailure: of kind `infra`, if the engine failed or is closed.
        """
        await self._call(lambda: self._core.update_weights(state, version))

    async def close(self) -> None:
        """Answer what is pending as aborted, stop the thread and wait for it. Idempotent."""
        with self._wake:
            self._is_closing = True
            self._wake.notify()
        while self._thread.is_alive():
            await asyncio.to_thread(self._thread.join)

    def stats(self) -> EngineStats:
        """A snapshot."""
        counters, core = self._core.counters, self._core
        uptime_s = self._clock.now_s() - self._started_s
        return EngineStats(
            busy_ratio=self._busy_s / uptime_s if uptime_s > 0 else 0.0,
            busy_s=self._busy_s,
            tokens_per_busy_s=counters.sampled_tokens / self._busy_s if self._busy_s > 0 else 0.0,
            num_steps=counters.num_steps,
            sampled_tokens=counters.sampled_tokens,
            prompt_tokens=counters.prompt_tokens,
            cached_tokens=counters.cached_tokens,
            num_preemptions=counters.num_preemptions,
            num_outstanding=len(self._outstanding),
            num_running=core.num_running,
            free_pages=core.free_pages,
            num_pages=core.limits.num_pages,
        )

    # Called from event loops.

    def _notify(self) -> None:
        with self._wake:
            self._wake.notify()

    def _refuse_if_stopped(self) -> None:
        if self._failure is not None:
            raise ClassifiedFailure(self._failure)
        if self._is_closing:
            raise ClassifiedFailure(_infra("the engine is closed"))

    def _submit(self, ticket: _Ticket) -> None:
        request_id = ticket.request.request_id
        with self._wake:
            self._refuse_if_stopped()
            if request_id in self._outstanding:
                raise UserError(
                    f"request id {request_id!r} is already in flight.", fix="use unique ids."
                )
            if len(self._outstanding) >= self._max_outstanding:
                raise ClassifiedFailure(
                    _infra(f"{self._max_outstanding} requests are already in flight")
                )
            if self._barrier is not None and len(self._inbox) >= self._barrier.num_live:
                raise UserError(
                    f"request {request_id!r} comes from no live episode.",
                    fix="call Barrier.enter() before the episode generates, leave() after it.",
                )
            self._outstanding[request_id] = ticket
            self._inbox.append(ticket)
            self._wake.notify()

    def _abort(self, ticket: _Ticket) -> None:
        with self._wake:
            ticket.is_aborted = True
            if self._outstanding.get(ticket.request.request_id) is ticket:
                del self._outstanding[ticket.request.request_id]
            if ticket in self._inbox:
                self._inbox.remove(ticket)
            else:
                self._aborted.append(ticket)
            self._wake.notify()

    async def _call(self, run: Callable[[], Any]) -> Any:
        call = _Call(run, Reply(asyncio.get_running_loop()))
        with self._wake:
            self._refuse_if_stopped()
            self._calls.append(call)
            self._wake.notify()
        return await call.reply.future

    # Called on the worker's thread only.

    def _run(self) -> None:
        if self._num_threads is not None:
            torch.set_num_threads(self._num_threads)
        failure = _infra("the engine's thread ended")
        try:
            with boundary(FailureKind.INFRA, _WHERE):
                while self._turn():
                    pass
        except ClassifiedFailure as error:
            failure = error.failure
        finally:
            self._stop(failure)

    def _turn(self) -> bool:
        """Wait for something to do, do one thing of each kind. False when closing."""
        with self._wake:
            self._wake.wait_for(self._is_awake)
            if self._is_closing:
                return False
            calls, self._calls = self._calls, []
            aborted, self._aborted = self._aborted, []
            arrived = self._inbox if self._is_wave_ready() else []
            if arrived:
                self._inbox = []
        start_s = self._clock.now_s()
        for call in calls:
            self._execute(call)
        if self._barrier is None:
            for ticket in aborted:
                if ticket.sequence is not None and ticket.sequence in self._active:
                    del self._active[ticket.sequence]
                    self._core.abort(ticket.sequence)
            self._start(arrived)
            self._deliver(self._core.step())
        elif arrived:
            self._wave(sorted(arrived, key=lambda t: t.request.request_id))
        self._busy_s += self._clock.now_s() - start_s
        return True

    def _is_awake(self) -> bool:
        return (
            self._is_closing
            or bool(self._calls or self._aborted)
            or self._core.has_work
            or self._is_wave_ready()
        )

    def _is_wave_ready(self) -> bool:
        if self._barrier is None:
            return bool(self._inbox)
        return 0 < len(self._inbox) == self._barrier.num_live

    def _execute(self, call: _Call) -> None:
        try:
            value = call.run()
        except UserError as error:
            call.reply.fail(error)
        except BaseException:
            # The step loop is about to stop: this caller must hear of it as well.
            self._calls.append(call)
            raise
        else:
            call.reply.resolve(value)

    def _start(self, tickets: list[_Ticket]) -> None:
        for ticket in tickets:
            if not ticket.is_aborted:
                ticket.sequence = self._core.add(ticket.request)
                self._active[ticket.sequence] = ticket

    def _wave(self, tickets: list[_Ticket]) -> None:
        """Run all to the end, then answer in order.

        A request that is cancelled meanwhile runs on and its result is dropped: stopping it would
        change the batch, and so the bits, of the others.
        """
        assert self._barrier is not None
        if self._barrier.num_quiet != self._quiet_seen:
            # What an earlier batch of episodes left in the index depends on history that a
            # resumed run does not have.
            self._quiet_seen = self._barrier.num_quiet
            self._core.forget_prefixes()
        self._start(tickets)
        done: dict[Sequence, Generation] = {}
        while self._core.has_work and not self._is_closing:
            done.update(self._core.step())
        self._deliver(
            [(t.sequence, done[t.sequence]) for t in tickets if t.sequence and t.sequence in done]
        )

    def _deliver(self, ended: list[tuple[Sequence, Generation]]) -> None:
        for sequence, generation in ended:
            ticket = self._active.pop(sequence)
            with self._wake:
                if not ticket.is_aborted:
                    del self._outstanding[ticket.request.request_id]
            ticket.reply.resolve(generation)

    def _stop(self, failure: Failure) -> None:
        """Answer everything that is pending; the last act of the thread."""
        with self._wake:
            if not self._is_closing:
                self._failure = failure
            self._is_closing = True
            tickets, calls = list(self._outstanding.values()), self._calls
            self._outstanding, self._inbox, self._calls = {}, [], []
        for ticket in tickets:
            if self._failure is not None:
                ticket.reply.fail(ClassifiedFailure(self._failure))
                continue
            generation = self._core.abort(ticket.sequence) if ticket.sequence else None
            ticket.reply.resolve(generation or _nothing(ticket.request))
        for call in calls:
            call.reply.fail(ClassifiedFailure(self._failure or _infra("the engine is closed")))


def _infra(message: str) -> Failure:
    return Failure(kind=FailureKind.INFRA, where=_WHERE, message=message)


def _nothing(request: GenerateRequest) -> Generation:
    return Generation(
        request_id=request.request_id,
        token_ids=(),
        logprobs=(),
        weight_versions=(),
        stop_reason=StopReason.ABORTED,
    )
