"""One step: guesses, the forward, and what follows from it for each sequence.

    next work -> guesses -> forward -----------> drawn tokens -> taken, ended, failed
                    '---> what grammars allow --'

What goes wrong with one request ends that request.
"""

import torch

from burnish.core.clock import Clock
from burnish.core.errors import ClassifiedFailure
from burnish.core.records import Failure, Generation
from burnish.core.vocabulary import StopReason
from burnish.rollout.engine import batch
from burnish.rollout.engine.batch import Work
from burnish.rollout.engine.cache.storage import KvCache
from burnish.rollout.engine.drawing import NOT_FINITE, Decision, decide
from burnish.rollout.engine.grammar import GrammarLimitError
from burnish.rollout.engine.limits import CoreCounters
from burnish.rollout.engine.masks import MaskMaker, limit_failure
from burnish.rollout.engine.placement import placed
from burnish.rollout.engine.scheduler import Scheduler
from burnish.rollout.engine.score import score_sampled
from burnish.rollout.engine.sequence import Sequence
from burnish.rollout.engine.speculation.drafter import Target
from burnish.rollout.engine.speculation.speculator import SpeculationCounters, Speculator
from burnish.rollout.engine.tier.losses import lost_requests
from burnish.rollout.engine.weights import ServedModel

Ended = list[tuple[Sequence, Generation | Failure]]


class Stepper:
    """Runs steps; counts what comes of them."""

    def __init__(
        self, scheduler: Scheduler, speculator: Speculator | None, clock: Clock | None = None
    ) -> None:
        """Of one engine; without a clock nothing is timed."""
        self._scheduler, self._speculator, self._clock = scheduler, speculator, clock
        self.masks = MaskMaker()
        """Computes what grammars allow."""
        self.mask_s = 0.0
        """Seconds that steps waited for masks."""
        self.sampled_tokens = self.prompt_tokens = self.num_failed = 0
        self.adapted_tokens = self.held_tokens = self.kv_gap_tokens = 0
        self.kv_gap_nats = 0.0
        """Totals since the start."""

    @property
    def counters(self) -> CoreCounters:
        """Totals since the start, of all that a step moves."""
        scheduler, guesses = self._scheduler, SpeculationCounters()
        if self._speculator is not None:
            guesses = self._speculator.counters
        return CoreCounters(
            num_steps=scheduler.num_steps,
            sampled_tokens=self.sampled_tokens,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=scheduler.cached_tokens,
            num_preemptions=scheduler.num_preemptions,
            num_swaps=scheduler.num_swaps,
            num_failed=self.num_failed,
            drafted_tokens=guesses.drafted_tokens,
            accepted_tokens=guesses.accepted_tokens,
            undrafted=guesses.skipped,
            adapted_tokens=self.adapted_tokens,
            held_tokens=self.held_tokens,
            mask_s=self.mask_s,
            kv_gap_nats=self.kv_gap_nats,
            kv_gap_tokens=self.kv_gap_tokens,
        )

    def step(self, model: ServedModel, cache: KvCache, version: int) -> Ended:
        """One forward over everything that can move; returns what ended with it."""
        work, speculator = self._scheduler.next_work(), self._speculator
        if not work:
            return []
        with torch.inference_mode(), placed(model.device):
            if speculator is None:
                return self._compute(model, cache, batch.arranged(work), version)
            memory = self._scheduler.memory
            target = Target(model, cache, memory.pool)
            budget = self._scheduler.limits.budget_tokens - sum(w.num_tokens for w in work)
            work = batch.arranged(speculator.propose(work, memory, target, version, budget))
            start_s = speculator.now_s()
            ended = self._compute(model, cache, work, version)
            speculator.stepped(work, speculator.now_s() - start_s)
            return ended

    def _compute(self, model: ServedModel, cache: KvCache, work: list[Work], version: int) -> Ended:
        """The forward, and what follows from it."""
        pending = self.masks.begin(work)
        hidden_TE = batch.forward(model, cache, work, self._scheduler.limits.kv)
        losses = cache.take_losses()
        start_s = self._now_s()
        allowed = pending()
        self.mask_s += self._now_s() - start_s
        broken = dict.fromkeys(batch.prompt_logprobs(model, hidden_TE, work), NOT_FINITE)
        failures = allowed.failures | broken | lost_requests(losses, work)
        self._scheduler.restart_holders(losses.pages, work)
        self.prompt_tokens += sum(
            min(w.num_tokens, max(0, w.sequence.num_prompt - w.sequence.num_computed)) for w in work
        )
        self._scheduler.computed(work)
        ended: Ended = [(each, self._fail(each, why)) for each, why in failures.items()]
        drawing = []
        for i, piece in enumerate(work):
            sequence = piece.sequence
            if sequence.num_pending or sequence in failures:
                continue
            if sequence.request.params.max_tokens == 0:
                ended.append((sequence, self._finish(model, sequence, StopReason.LENGTH)))
            else:
                drawing.append(i)
        if not drawing:
            return ended
        for i, decision in zip(
            drawing, decide(model, hidden_TE, work, drawing, allowed.masks), strict=True
        ):
            outcome = self._take(model, work[i], decision, version)
            if outcome is not None:
                ended.append((work[i].sequence, outcome))
        return ended

    def _take(
        self, model: ServedModel, piece: Work, decision: Decision, version: int
    ) -> Generation | Failure | None:
        """Give a sequence its tokens; what became of it, if that ended it."""
        sequence, draft = piece.sequence, piece.draft
        reason = failure = None
        if sequence.adapter is not None:
            version = max(version, sequence.adapter.version)
        for place, token in enumerate(decision.tokens):
            # The token before was a right guess: its keys and values are in the cache.
            sequence.num_computed += place > 0
            self.sampled_tokens += 1
            self.adapted_tokens += sequence.adapter is not None
            self.held_tokens += sequence.grammar is not None
            try:
                reason = sequence.append(token, version)
            except ClassifiedFailure as error:
                failure = error.failure
            except GrammarLimitError as error:
                failure = limit_failure(error)
            if reason is not None or failure is not None:
                break
        else:
            # Whatever is wrong behind the token that ends a request does not concern it.
            failure = decision.failure
        is_over = reason is not None or failure is not None
        if draft.tokens and self._speculator is not None:
            accepted = len(decision.tokens) - (decision.failure is None)
            self._speculator.checked(sequence, draft, accepted, is_over=is_over)
            self._scheduler.memory.trim(sequence)
        if reason is not None:
            return self._finish(model, sequence, reason)
        return None if failure is None else self._fail(sequence, failure)

    def _now_s(self) -> float:
        return self._clock.now_s() if self._clock is not None else 0.0

    def _finish(self, model: ServedModel, sequence: Sequence, reason: StopReason) -> Generation:
        self._scheduler.end(sequence)
        limits = self._scheduler.limits
        if limits.kv.is_sparse and limits.kv.report_gap and sequence.num_sampled:
            dense = score_sampled(model, sequence, limits.page_size)
            gaps = (abs(a - b) for a, b in zip(dense, sequence.logprobs, strict=True))
            self.kv_gap_nats += sum(gaps)
            self.kv_gap_tokens += len(dense)
            sequence.dense_logprobs = dense
        return sequence.result(reason)

    def _fail(self, sequence: Sequence, failure: Failure) -> Failure:
        self.num_failed += 1
        self._scheduler.fail(sequence)
        return failure
