"""Decides who guesses how much in a step, and learns from what came of it.

    plan of the step -> propose (guesses, pages for them) -> forward -> checked (acceptance, cost)

Drafts take only what is left: budget, and pages beyond one for each running sequence. A draft that
is rejected costs time and nothing else.
"""

from collections import Counter
from collections.abc import Sequence as Seq
from typing import NamedTuple
from weakref import WeakKeyDictionary

from burnish.core.clock import Clock
from burnish.core.vocabulary import NoDraft
from burnish.rollout.engine.batch import Work
from burnish.rollout.engine.residency import Residency
from burnish.rollout.engine.sequence import Sequence
from burnish.rollout.engine.speculation.acceptance import Acceptance
from burnish.rollout.engine.speculation.costs import StepCosts
from burnish.rollout.engine.speculation.drafter import Ask, Draft, Drafter, Target
from burnish.rollout.engine.speculation.lengths import Prices, choose_lengths

# Before anything was checked. High enough to try, low enough to stop soon where it fails.
_FIRST_RATE = 0.7
_KEPT_SHARED = 0.98
# Steps that guess against better knowledge, so that costs are learned, get a 64th of the time.
_EXPLORED_SHARE = 1 / 64
_EXPLORED_TOKENS, _EXPLORED_DEPTH = 8, 4
# Requests whose ids begin alike (up to the first slash) are of one kind; this many are told apart.
_MOST_KINDS = 256


class SpeculationCounters(NamedTuple):
    """Totals since the start."""

    drafted_tokens: int = 0
    """Guesses that were checked."""
    accepted_tokens: int = 0
    """Of these, those that were right."""
    skipped: tuple[tuple[NoDraft, int], ...] = ()
    """How often a decoding sequence had no guess in a step, by reason."""


class Speculator:
    """Of one engine; `clock` None decides by assumed costs, so that nothing hangs on wall time."""

    def __init__(self, drafter: Drafter, max_tokens: int, clock: Clock | None) -> None:
        """Guess up to `max_tokens` tokens per sequence and step."""
        assert max_tokens > 0
        self.drafter, self._most, self._clock = drafter, max_tokens, clock
        self._costs, self._draft_costs = StepCosts(), StepCosts()
        self._accepted = self._drafted = 0
        self._is_exploring = False
        self._stepped_s = self._explored_s = 0.0
        self._skipped: Counter[NoDraft] = Counter()
        self.forget()

    @property
    def counters(self) -> SpeculationCounters:
        """Totals since the start."""
        skipped = tuple(sorted(self._skipped.items()))
        return SpeculationCounters(self._drafted, self._accepted, skipped)

    def forget(self) -> None:
        """Forget how often guesses were right."""
        self._shared: dict[str, Acceptance] = {}
        self._own: WeakKeyDictionary[Sequence, Acceptance] = WeakKeyDictionary()

    def now_s(self) -> float:
        """The time, or always 0."""
        return 0.0 if self._clock is None else self._clock.now_s()

    def propose(
        self, work: list[Work], memory: Residency, target: Target, version: int, budget: int
    ) -> list[Work]:
        """Add guesses to the pieces that decode; `budget` tokens are left in the step."""
        able = [i for i, w in enumerate(work) if w.num_tokens == w.sequence.num_pending == 1]
        self._is_exploring = False
        reason = self.drafter.unable(version)
        if reason is not None:
            self._skipped[reason] += len(able)
            return work
        asks = self._asks(work, able, memory, budget)
        if not asks:
            return work
        start_s = self.now_s()
        drafts = self.drafter.draft(asks, target)
        levels = max((len(d.tokens) for d in drafts), default=0)
        drafting_s = self.now_s() - start_s
        if self._clock is not None and levels and self.drafter.relative_cost > 0.0:
            self._draft_costs.saw(len(asks), len(asks), drafting_s / levels)
        if self._is_exploring:
            self._explored_s += drafting_s
        found = {
            ask.sequence: self._fitting(ask.sequence, draft)
            for ask, draft in zip(asks, drafts, strict=True)
        }
        proposed = []
        for piece in work:
            draft = found.get(piece.sequence)
            if draft is None or not draft.tokens:
                if draft is not None:
                    memory.trim(piece.sequence)
                proposed.append(piece)
            else:
                proposed.append(Work(piece.sequence, 1 + len(draft.tokens), draft))
        return proposed

    def checked(
        self, sequence: Sequence, draft: Draft, num_accepted: int, *, is_over: bool
    ) -> None:
        """Guesses were compared with what the target drew; `is_over` if that ended the request."""
        num_drafted = len(draft.tokens)
        self._drafted += num_drafted
        self._accepted += num_accepted
        self._rate_of(sequence).saw(num_accepted, num_drafted)
        self._kind_of(sequence).saw(num_accepted, num_drafted)
        if not is_over:
            self.drafter.checked(sequence, num_accepted)

    def stepped(self, work: Seq[Work], seconds: float) -> None:
        """A step took so long; those that read prompts tell nothing about decoding."""
        self._stepped_s += seconds
        if self._is_exploring:
            self._explored_s += seconds
        if self._clock is not None and all(w.num_known == 1 for w in work):
            self._costs.saw(len(work), sum(w.num_tokens for w in work), seconds)

    def _asks(self, work: Seq[Work], able: Seq[int], memory: Residency, budget: int) -> list[Ask]:
        """Whom to guess for, with pages for it."""
        pieces = [work[i] for i in able]
        most = [self._limit(w.sequence, min(self._most, budget)) for w in pieces]
        rates = [self._rate_of(w.sequence) for w in pieces]
        prices = self._prices(len(pieces), sum(w.num_tokens for w in work))
        lengths = choose_lengths([rate.rate for rate in rates], most, prices)
        if len(able) == len(work) and self._may_explore(len(work)):
            lengths = self._other_lengths(lengths, most)
        asks: list[Ask] = []
        spare = memory.pool.room - len(work)
        for piece, limit, length, rate in zip(pieces, most, lengths, rates, strict=True):
            sequence = piece.sequence
            if not length:
                rate.idle()
                if limit and not self._is_exploring:
                    self._skipped[NoDraft.COST] += 1
                continue
            held = len(sequence.pages) * memory.pool.page_size - len(sequence.tokens)
            room = held + max(0, spare) * memory.pool.page_size
            length = min(length, room, budget)
            if length < 1:
                self._skipped[NoDraft.ROOM] += 1
                continue
            new = memory.pool.pages_for(len(sequence.tokens) + length) - len(sequence.pages)
            if new > 0:
                memory.grow(sequence, new)
                spare -= new
            budget -= length
            asks.append(Ask(sequence, length))
        return asks

    def _may_explore(self, num_rows: int) -> bool:
        """Whether steps have been too much alike to tell what a token costs, and it is time."""
        is_due = self._explored_s <= _EXPLORED_SHARE * self._stepped_s
        return self._clock is not None and is_due and self._costs.is_blind(num_rows)

    def _other_lengths(self, lengths: Seq[int], most: Seq[int]) -> list[int]:
        """No guesses where there would be some, a few where there would be none."""
        others, left = [0] * len(lengths), _EXPLORED_TOKENS
        if not any(lengths):
            for i, limit in enumerate(most):
                others[i] = min(limit, left, _EXPLORED_DEPTH)
                left -= others[i]
        self._is_exploring = others != list(lengths)
        return others

    def _limit(self, sequence: Sequence, most: int) -> int:
        """Tokens that could be guessed; why none, if none."""
        left = sequence.max_length - len(sequence.tokens) - 1
        if left < 1:
            self._skipped[NoDraft.ENDING] += 1
            return 0
        if most < 1:
            self._skipped[NoDraft.ROOM] += 1
            return 0
        limit = self.drafter.limit(sequence, min(most, left))
        if not limit:
            self._skipped[self.drafter.no_limit] += 1
        return limit

    def _prices(self, num_rows: int, num_tokens: int) -> Prices:
        step = self._costs.predict(num_rows, num_tokens)
        token = self._costs.predict(num_rows, num_tokens + 1) - step
        level = level_token = 0.0
        if self.drafter.relative_cost > 0.0:
            if self._draft_costs.is_measured:
                level = self._draft_costs.predict(num_rows, num_rows)
            else:
                level = self.drafter.relative_cost * self._costs.predict(num_rows, num_rows)
            level_token = self.drafter.relative_cost * token
        return Prices(step, token, level, level_token)

    def _fitting(self, sequence: Sequence, draft: Draft) -> Draft:
        """Without what cannot come: what the grammar refuses, and anything from a stop on."""
        if not draft.tokens:
            self._skipped[NoDraft.READING] += 1
            return draft
        tokens = list(draft.tokens)
        stop = next((i for i, token in enumerate(tokens) if token in sequence.stops), len(tokens))
        if sequence.grammar is not None:
            stop = min(stop, sequence.grammar.prefix_length(tokens))
        if not stop:
            self._skipped[NoDraft.REFUSED] += 1
        return draft.cut(stop)

    def _rate_of(self, sequence: Sequence) -> Acceptance:
        own = self._own.get(sequence)
        if own is None:
            own = self._own[sequence] = Acceptance(self._kind_of(sequence).rate)
        return own

    def _kind_of(self, sequence: Sequence) -> Acceptance:
        kind = sequence.request.request_id.partition("/")[0]
        if kind not in self._shared:
            if len(self._shared) >= _MOST_KINDS:
                del self._shared[next(iter(self._shared))]
            self._shared[kind] = Acceptance(_FIRST_RATE, _KEPT_SHARED)
        return self._shared[kind]
