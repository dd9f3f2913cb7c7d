"""The engine's thread: takes requests and calls from any thread, steps the core, delivers.

    any thread --submit/abort/call--> inbox --> turn: calls, aborts, step or wave
        ^                                          |
        '------ replies, through their own loops --'

The thread alone touches the core. Calls run between two steps, or with a barrier between two
waves. If a step raises, everything pending fails with one classified failure and the loop refuses
further work: nothing hangs, and doubtful state never answers.
"""

from threading import Condition, Thread

import torch

from burnish.core.clock import Clock
from burnish.core.errors import ClassifiedFailure, UserError, boundary
from burnish.core.records import Failure, GenerateRequest, Generation
from burnish.core.vocabulary import FailureKind, StopReason
from burnish.rollout.engine.barrier import Barrier
from burnish.rollout.engine.engine import EngineCore
from burnish.rollout.engine.meter import Meter
from burnish.rollout.engine.sequence import Sequence
from burnish.rollout.engine.stepper import Ended
from burnish.rollout.engine.ticket import Call, Ticket

_WHERE = "rollout.engine"


class EngineLoop:
    """Owns the thread. What is marked so runs on it; the rest may be called from any thread."""

    def __init__(
        self,
        core: EngineCore,
        *,
        num_threads: int | None,
        barrier: Barrier | None,
        max_outstanding: int,
        clock: Clock,
    ) -> None:
        """Start the thread."""
        self.core, self.meter = core, Meter(clock)
        self._num_threads, self._barrier = num_threads, barrier
        self._max_outstanding = max_outstanding
        self._wake = Condition()
        self._inbox: list[Ticket] = []
        self._calls: list[Call] = []
        self._aborted: list[Ticket] = []
        self._outstanding: dict[str, Ticket] = {}
        self._active: dict[Sequence, Ticket] = {}
        self._streaming: dict[Ticket, None] = {}
        self._failure: Failure | None = None
        self._is_closing = False
        self._quiet_seen = 0
        self.is_paused = False
        if barrier is not None:
            barrier.subscribe(self._notify)
        self._thread = Thread(target=self._run, name="burnish-engine", daemon=True)
        self._thread.start()

    @property
    def num_outstanding(self) -> int:
        """Requests not answered yet."""
        return len(self._outstanding)

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def submit(self, ticket: Ticket) -> None:
        """Take a valid request.

        Raises:
            UserError: if its id is in flight, or it comes from no live episode.
            ClassifiedFailure: if the engine failed, is closed or is overloaded.
        """
        request_id = ticket.request.request_id
        with self._wake:
            self._refuse_if_stopped()
            if request_id in self._outstanding:
                raise UserError(
                    f"request id {request_id!r} is already in flight.", fix="use unique ids."
                )
            if len(self._outstanding) >= self._max_outstanding:
                raise ClassifiedFailure(
                    infra(f"{self._max_outstanding} requests are already in flight")
                )
            if self._barrier is not None and len(self._inbox) >= self._barrier.num_live:
                raise UserError(
                    f"request {request_id!r} comes from no live episode.",
                    fix="call Barrier.enter() before the episode generates, leave() after it.",
                )
            self._outstanding[request_id] = ticket
            self._inbox.append(ticket)
            self._wake.notify()

    def abort(self, ticket: Ticket) -> None:
        """Nobody waits for this request any more; one that was answered is left alone."""
        with self._wake:
            ticket.is_aborted = True
            if self._outstanding.get(ticket.request.request_id) is not ticket:
                return
            del self._outstanding[ticket.request.request_id]
            if ticket in self._inbox:
                self._inbox.remove(ticket)
            else:
                self._aborted.append(ticket)
            self._wake.notify()

    def call(self, call: Call) -> None:
        """Have something run between two steps.

        Raises:
            ClassifiedFailure: if the engine failed or is closed.
        """
        with self._wake:
            self._refuse_if_stopped()
            self._calls.append(call)
            self._wake.notify()

    def close(self) -> None:
        """Ask the thread to answer what is pending as aborted, and to end."""
        with self._wake:
            self._is_closing = True
            self._wake.notify()

    def join(self) -> None:
        """Wait for the thread's end."""
        self._thread.join()

    def deliver(self, ended: Ended) -> None:
        """On the thread: answer what has ended."""
        for sequence, outcome in ended:
            ticket = self._active.pop(sequence)
            self._streaming.pop(ticket, None)
            self._answered(ticket)
            ticket.settle(outcome)

    def _answered(self, ticket: Ticket) -> None:
        with self._wake:
            if not ticket.is_aborted:
                del self._outstanding[ticket.request.request_id]

    def _notify(self) -> None:
        with self._wake:
            self._wake.notify()

    def _refuse_if_stopped(self) -> None:
        if self._failure is not None:
            raise ClassifiedFailure(self._failure)
        if self._is_closing:
            raise ClassifiedFailure(infra("the engine is closed"))

    # All that follows runs on the thread only.

    def _run(self) -> None:
        if self._num_threads is not None:
            torch.set_num_threads(self._num_threads)
        failure = infra("the engine's thread ended")
        try:
            with boundary(FailureKind.INFRA, _WHERE):
                while self._turn():
                    pass
        except ClassifiedFailure as error:
            failure = error.failure
        finally:
            self._stop(failure)
            self.core.close()

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
        start_s = self.meter.now_s()
        for call in calls:
            self._execute(call)
        if self._barrier is not None:
            if arrived:
                self._wave(sorted(arrived, key=lambda t: t.request.request_id))
        else:
            self._drop(aborted)
            self._start(arrived)
            if self.core.has_work and not self.is_paused:
                self._step()
        self.meter.busy_s += self.meter.now_s() - start_s
        return True

    def _is_awake(self) -> bool:
        return (
            self._is_closing
            or bool(self._calls or self._aborted)
            or (self.core.has_work and not self.is_paused)
            or self._is_wave_ready()
        )

    def _is_wave_ready(self) -> bool:
        if self._barrier is None:
            return bool(self._inbox)
        return not self.is_paused and 0 < len(self._inbox) == self._barrier.num_live

    def _execute(self, call: Call) -> None:
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

    def _drop(self, tickets: list[Ticket]) -> None:
        for ticket in tickets:
            if ticket.sequence is not None and ticket.sequence in self._active:
                del self._active[ticket.sequence]
                self._streaming.pop(ticket, None)
                self.core.abort(ticket.sequence)

    def _start(self, tickets: list[Ticket]) -> None:
        for ticket in tickets:
            if ticket.is_aborted:
                continue
            try:
                ticket.sequence = self.core.add(ticket.request)
            except UserError as error:
                # It could run when it was submitted: its adapter has gone since.
                self._answered(ticket)
                ticket.refuse(error)
                continue
            self._active[ticket.sequence] = ticket
            if ticket.is_streaming:
                self._streaming[ticket] = None

    def _step(self) -> None:
        start_s = self.meter.now_s()
        ended = self.core.step()
        took_part = [*self.core.running, *(sequence for sequence, _ in ended)]
        self.meter.stepped((self._active[sequence] for sequence in took_part), start_s)
        self.deliver(ended)
        for ticket in self._streaming:
            ticket.deliver_new()

    def _wave(self, tickets: list[Ticket]) -> None:
        """Run all to the end, then answer in order.

        A request that is cancelled meanwhile runs on and its result is dropped: stopping it would
        change the batch, and so the bits, of the others.
        """
        assert self._barrier is not None
        if self._barrier.num_quiet != self._quiet_seen:
            # What an earlier batch of episodes left behind depends on history that a resumed run
            # does not have.
            self._quiet_seen = self._barrier.num_quiet
            self.core.forget_prefixes()
            self.core.forget_sessions()
        self._start(tickets)
        done: dict[Sequence, Generation | Failure] = {}
        while self.core.has_work and not self._is_closing:
            done.update(self.core.step())
        self.deliver(
            [(t.sequence, done[t.sequence]) for t in tickets if t.sequence and t.sequence in done]
        )

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
                ticket.settle(self._failure)
                continue
            generation = self.core.abort(ticket.sequence) if ticket.sequence else None
            ticket.settle(generation or _nothing(ticket.request))
        for call in calls:
            call.reply.fail(ClassifiedFailure(self._failure or infra("the engine is closed")))


def infra(message: str) -> Failure:
    """A failure of the engine itself."""
    return Failure(kind=FailureKind.INFRA, where=_WHERE, message=message)


def _nothing(request: GenerateRequest) -> Generation:
    return Generation(
        request_id=request.request_id,
        token_ids=(),
        logprobs=(),
        weight_versions=(),
        stop_reason=StopReason.ABORTED,
    )
