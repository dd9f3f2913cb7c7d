"""What requests had to wait for, and how busy the engine is."""

from collections.abc import Iterable

from burnish.core.clock import Clock
from burnish.rollout.engine.histogram import Timer
from burnish.rollout.engine.ticket import Ticket


class Meter:
    """Owned by the engine's thread; snapshots may be read from any."""

    def __init__(self, clock: Clock) -> None:
        """Nothing measured."""
        self._clock = clock
        self._started_s = clock.now_s()
        self.busy_s = 0.0
        self.queue, self.first_token, self.inter_token = Timer(), Timer(), Timer()

    def now_s(self) -> float:
        """The time."""
        return self._clock.now_s()

    @property
    def uptime_s(self) -> float:
        """Since the start."""
        return self._clock.now_s() - self._started_s

    def stepped(self, tickets: Iterable[Ticket], step_start_s: float) -> None:
        """A step that these took part in is over."""
        now_s = self._clock.now_s()
        for ticket in tickets:
            sequence = ticket.sequence
            assert sequence is not None
            if ticket.started_s is None:
                ticket.started_s = step_start_s
                self.queue.add(step_start_s - ticket.arrived_s)
            new = sequence.num_sampled - ticket.num_seen
            if new <= 0:
                continue
            if ticket.first_s is None:
                ticket.first_s = now_s
                self.first_token.add(now_s - ticket.arrived_s)
                if new > 1:
                    self.inter_token.add(0.0, new - 1)
            else:
                # Tokens of one step come together; each counts with its share of the time.
                self.inter_token.add((now_s - ticket.last_s) / new, new)
            ticket.num_seen, ticket.last_s = sequence.num_sampled, now_s
