"""A request from its arrival at the engine to its answer."""

from collections.abc import Callable
from typing import Any

import msgspec

from burnish.core.errors import ClassifiedFailure, UserError
from burnish.core.records import Failure, GenerateRequest, Generation, GenerationDelta
from burnish.core.vocabulary import StopReason
from burnish.rollout.engine.reply import Reply, Stream
from burnish.rollout.engine.sequence import Sequence


class Ticket:
    """Who asked what, since when, and what was delivered."""

    def __init__(
        self, request: GenerateRequest, sink: Reply[Generation] | Stream, arrived_s: float
    ) -> None:
        """Just arrived."""
        self.request, self.sink, self.arrived_s = request, sink, arrived_s
        self.sequence: Sequence | None = None
        self.is_aborted = False
        self.started_s: float | None = None
        self.first_s: float | None = None
        self.last_s = arrived_s
        self.num_seen = 0

    @property
    def is_streaming(self) -> bool:
        """Whether tokens are delivered before the end."""
        return isinstance(self.sink, Stream)

    def deliver_new(self) -> None:
        """Stream what was sampled since the last delivery."""
        sequence = self.sequence
        if not isinstance(self.sink, Stream) or sequence is None:
            return
        if sequence.num_sampled > self.sink.num_sent:
            self.sink.push(self._delta(sequence.result(StopReason.LENGTH), None))

    def settle(self, outcome: Generation | Failure) -> None:
        """Deliver the end."""
        if isinstance(outcome, Failure):
            self.sink.fail(ClassifiedFailure(outcome))
            return
        if self.started_s is not None:
            outcome = msgspec.structs.replace(
                outcome,
                queued_s=self.started_s - self.arrived_s,
                first_token_s=0.0 if self.first_s is None else self.first_s - self.arrived_s,
            )
        if isinstance(self.sink, Stream):
            self.sink.push(self._delta(outcome, outcome))
        else:
            self.sink.resolve(outcome)

    def refuse(self, error: UserError) -> None:
        """Deliver that it cannot run."""
        self.sink.fail(error)

    def _delta(self, so_far: Generation, final: Generation | None) -> GenerationDelta:
        assert isinstance(self.sink, Stream)
        start = self.sink.num_sent
        return GenerationDelta(
            request_id=so_far.request_id,
            token_ids=so_far.token_ids[start:],
            logprobs=so_far.logprobs[start:],
            weight_versions=so_far.weight_versions[start:],
            top_logprobs=so_far.top_logprobs[start:],
            generation=final,
        )


class Call:
    """Something to run on the engine's thread between two steps."""

    def __init__(self, run: Callable[[], Any], reply: Reply[Any]) -> None:
        """Not run yet."""
        self.run, self.reply = run, reply
