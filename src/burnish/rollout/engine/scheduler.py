"""Who computes what in the next step: queue, batch and cache, moved together.

add -> waiting --admit--> running --end/remove--> gone
          ^                 |
          '----- preempt ---'
"""

from bisect import insort
from collections.abc import Collection

from burnish.core.vocabulary import KvPolicyKind
from burnish.rollout.engine.batch import Work
from burnish.rollout.engine.limits import CoreLimits
from burnish.rollout.engine.long.policy import TAIL_TOKENS, KvPolicy
from burnish.rollout.engine.pages import Match
from burnish.rollout.engine.plan import Load, StepPlan, plan_step
from burnish.rollout.engine.radix import Node
from burnish.rollout.engine.residency import Residency
from burnish.rollout.engine.sequence import Sequence
from burnish.rollout.engine.waiting import WaitingQueue

_MOST_COMPARED = 32


class Scheduler:
    """Decides on sequences; computes nothing."""

    def __init__(self, memory: Residency, limits: CoreLimits) -> None:
        """Nobody is here."""
        self.memory, self.limits = memory, limits
        self.waiting = WaitingQueue(limits.ageing_steps)
        self.running: list[Sequence] = []
        """In order of service."""
        self.num_steps = self.cached_tokens = self.num_preemptions = self.num_swaps = 0
        """Totals since the start."""

    def add(self, sequence: Sequence) -> None:
        """A new request."""
        self.waiting.add(sequence, self.num_steps)

    def remove(self, sequence: Sequence) -> bool:
        """Give a request up; False if it is not here."""
        if sequence in self.running:
            self._leave(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        else:
            return False
        self.memory.finish(sequence)
        return True

    def end(self, sequence: Sequence) -> None:
        """A running request has all its tokens: what it computed stays known."""
        self._leave(sequence)
        self.memory.index(sequence, with_tail=True)
        self.memory.finish(sequence)
        self.waiting.remember_session(sequence.request.session_id)

    def fail(self, sequence: Sequence) -> None:
        """A running request broke: nothing of what it computed may be read again."""
        self._leave(sequence)
        self.memory.spoil(sequence)

    def restart(self, sequence: Sequence) -> None:
        """Compute all its tokens again, at its old place in the order."""
        if sequence in self.running:
            self._leave(sequence)
            self.waiting.push(sequence)
        self.memory.drop(sequence)

    def restart_holders(self, pages: Collection[int], work: list[Work]) -> None:
        """Nobody may match these pages; those that hold any and are not in this step start anew."""
        self.memory.pool.spoil(list(pages))
        busy = {sequence for sequence, _ in work}
        for sequence in [*self.running, *self.waiting] if pages else ():
            if sequence not in busy and not set(pages).isdisjoint(sequence.pages):
                self.restart(sequence)

    def computed(self, work: list[Work]) -> None:
        """The tokens of a step are in the cache."""
        self.num_steps += 1
        for sequence, num_tokens in work:
            prompt_left = sequence.num_prompt - sequence.num_computed
            sequence.num_computed += num_tokens
            self.memory.thin(sequence, num_tokens)
            self.memory.index(sequence, with_tail=0 < prompt_left <= num_tokens)
            if self.waiting.leads(sequence):
                is_read = sequence.num_pending == 0
                self.waiting.unpark(sequence, None if is_read else sequence.num_computed)

    def next_work(self) -> list[Work]:
        """The pieces of the next step with pages for all of them, single tokens first."""
        self._admit()
        plan = self._plan()
        work = [Work(self.running[chunk.position], chunk.num_tokens) for chunk in plan.chunks]
        for (sequence, _), chunk in zip(work, plan.chunks, strict=True):
            if chunk.num_new_pages:
                self.memory.grow(sequence, chunk.num_new_pages)
        return work

    def check(self) -> None:
        """Assert that no page is lost or doubly owned."""
        self.memory.pool.check([s.held_pages for s in (*self.running, *self.waiting)])
        assert self.running == sorted(self.running, key=_rank)

    def _admit(self) -> None:
        if not self.waiting:
            return
        if not self.running:
            self.memory.renew_pins()
        # One prompt takes half of the budget at most, so that it keeps nobody else from starting.
        most = max(1, self.limits.budget_tokens // 2)
        budget = self.limits.budget_tokens - sum(min(s.num_pending, most) for s in self.running)
        reading: dict[Node, list[Sequence]] = {}
        for sequence in self.running:
            _note_reading(reading, sequence)
        while budget > 0:
            head = self.waiting.head()
            if head is None or len(self.running) >= self.limits.max_running:
                return
            match = None
            if head.saved is None:
                match = self.memory.match(head)
                leader = self._leader(head, match, reading)
                if leader is not None:
                    self.waiting.park(head, leader, self._target(head, leader, match))
                    continue
            if not self._enter(head, match):
                if self.running or not self._relieve(head):
                    return
                continue
            budget -= min(head.num_pending, most)
            _note_reading(reading, head)

    def _enter(self, sequence: Sequence, match: Match | None) -> bool:
        """Start a waiting sequence if there are pages for it; without a match, from host memory."""
        memory, num_running = self.memory, len(self.running)
        if match is None:
            if not memory.may_restore(sequence, num_running):
                return False
            self.waiting.remove(sequence)
            memory.restore(sequence)
        else:
            if not memory.fits(sequence, match, num_running):
                # The page being copied may be the very one that is missing.
                match = match.without_tail()
                if not memory.fits(sequence, match, num_running):
                    return False
            self.waiting.remove(sequence)
            memory.start(sequence, match)
            self.cached_tokens += match.num_tokens
        insort(self.running, sequence, key=_rank)
        return True

    def _leader(
        self, sequence: Sequence, match: Match, reading: dict[Node, list[Sequence]]
    ) -> Sequence | None:
        """A running prompt that is about to fill the very page that this one needs next."""
        if sequence.wants_prompt:
            return None
        start = match.node.depth * self.limits.page_size
        end = min(start + self.limits.page_size, len(sequence.tokens) - 1)
        if end <= match.num_tokens:
            return None
        needed = sequence.tokens[start:end]
        for other in reading.get(match.node, ())[:_MOST_COMPARED]:
            if other.tokens[start:end] == needed and other.num_prompt > match.num_tokens:
                return other
        return None

    def _target(self, sequence: Sequence, leader: Sequence, match: Match) -> int:
        """How much the leader must have computed to be of no more use to this sequence."""
        size, last = self.limits.page_size, len(sequence.tokens) - 1
        end = match.node.depth * size
        while end < last and (
            sequence.tokens[end : min(end + size, last)]
            == leader.tokens[end : min(end + size, last)]
        ):
            end += size
        return min(end, leader.num_prompt)

    def _plan(self) -> StepPlan:
        kv = self.limits.kv
        while True:
            plan = plan_step(
                [Load(_next_tokens(s, kv), s.num_computed, len(s.pages)) for s in self.running],
                room=self.memory.pool.room,
                budget_tokens=self.limits.budget_tokens,
                page_size=self.limits.page_size,
            )
            if not plan.is_short:
                return plan
            if len(self.running) > 1:
                self._preempt(self.running[-1])
            else:
                is_relieved = self._relieve(self.running[0])
                assert is_relieved, "a lone request does not fit: validation was wrong"

    def _preempt(self, sequence: Sequence) -> None:
        self._leave(sequence)
        self.num_preemptions += 1
        self.num_swaps += self.memory.preempt(sequence)
        self.waiting.push(sequence)

    def _relieve(self, favoured: Sequence) -> bool:
        """Free pages that hold nobody's next step; whether there were any."""
        if self.memory.num_pinned_pages:
            self.memory.yield_pins()
            return True
        holders = [s for s in self.waiting if s.pages and s is not favoured]
        if not holders and favoured.saved is not None:
            holders = [favoured]
        for sequence in holders:
            self.memory.drop(sequence)
        return bool(holders)

    def _leave(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.waiting.unpark(sequence)


def _rank(sequence: Sequence) -> tuple[int, int]:
    return sequence.rank


def _next_tokens(sequence: Sequence, kv: KvPolicy) -> int:
    """Tokens to compute next: the last ones of a prompt apart where they select pages."""
    pending = sequence.num_pending
    if kv.kind is KvPolicyKind.QUEST and pending > TAIL_TOKENS:
        return pending - TAIL_TOKENS
    return pending


def _note_reading(reading: dict[Node, list[Sequence]], sequence: Sequence) -> None:
    """Note a sequence whose pages others will be able to share."""
    if sequence.num_pending > 1 and sequence.node is not None and sequence.node.is_alive:
        reading.setdefault(sequence.node, []).append(sequence)
