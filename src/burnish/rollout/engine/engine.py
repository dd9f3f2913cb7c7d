"""The inference core: add requests, step, take what is finished. Synchronous, one thread.

    add -> waiting -> admit (match prefix, take pages) -> running -> step -> finished
                ^                                            |
                '--------- preempt (pages given back) -------'

A step computes one token for every decoding sequence and chunks of prompts, in one forward.
"""

from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from burnish.core.errors import UserError
from burnish.core.records import GenerateRequest, Generation
from burnish.core.vocabulary import StopReason
from burnish.model.config import ModelConfig
from burnish.rollout.engine import score as scoring
from burnish.rollout.engine.cache_attention import Span
from burnish.rollout.engine.native_attention import attend_for, make_cache
from burnish.rollout.engine.pages import Match, PagePool
from burnish.rollout.engine.plan import Chunk, Load, may_admit, plan_step
from burnish.rollout.engine.sampler import Draw, sample, seed_key, uniform
from burnish.rollout.engine.sequence import Sequence
from burnish.rollout.engine.weights import ServedModel


class CoreLimits(NamedTuple):
    """Sizes of an engine."""

    num_pages: int = 4096
    """Pages of the cache; memory is used as they are first touched."""
    page_size: int = 16
    """Tokens per page."""
    max_running: int = 256
    """Most sequences in one step."""
    budget_tokens: int = 1024
    """Most tokens in one step."""
    exact: bool = False
    """Tokens and log-probs depend on nothing but the request and the weights."""


class CoreCounters(NamedTuple):
    """Totals since the start."""

    num_steps: int
    """Forwards."""
    sampled_tokens: int
    """Tokens sampled."""
    prompt_tokens: int
    """Prompt tokens computed, recomputation after preemption included."""
    cached_tokens: int
    """Prompt tokens found in the prefix index."""
    num_preemptions: int
    """Sequences that had to give their pages back."""


class EngineCore:
    """Continuous batching over a paged cache."""

    def __init__(
        self,
        config: ModelConfig,
        state: Mapping[str, Tensor],
        *,
        version: int = 0,
        dtype: torch.dtype = torch.bfloat16,
        limits: CoreLimits | None = None,
    ) -> None:
        """Copy the weights and lay out the cache.

        Raises:
            UserError: if the weights do not fit the configuration, or `limits` asks to be exact and
                this machine cannot be.
        """
        self.config, self.limits = config, limits or CoreLimits()
        self.weight_version = version
        self._model = ServedModel(config, state, dtype, exact=self.limits.exact)
        self._cache = make_cache(config, self.limits.num_pages, self.limits.page_size, dtype)
        self._pool = PagePool(self.limits.num_pages, self.limits.page_size)
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._counters = CoreCounters(0, 0, 0, 0, 0)

    @property
    def counters(self) -> CoreCounters:
        """Totals since the start."""
        return self._counters

    @property
    def has_work(self) -> bool:
        """Whether `step` would do anything."""
        return bool(self._waiting or self._running)

    @property
    def num_running(self) -> int:
        """Sequences that hold pages."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Sequences that hold none."""
        return len(self._waiting)

    @property
    def free_pages(self) -> int:
        """Pages that can be handed out."""
        return self._pool.room

    def validate(self, request: GenerateRequest) -> None:
        """Refuse a request that could never run. Touches no state: safe from any thread.

        Raises:
            UserError: naming the value and its bound.
        """
        params, context = request.params, self.config.max_position_embeddings
        where = f"request {request.request_id}:"
        length = len(request.prompt_ids)
        if length == 0:
            raise UserError(f"{where} the prompt is empty.", fix="give at least one token.")
        if length >= context:
            raise UserError(
                f"{where} the prompt has {length} tokens, the model's context is {context}.",
                fix="shorten the prompt or drop old turns.",
            )
        if not 0 <= min(request.prompt_ids) <= max(request.prompt_ids) < self.config.vocab_size:
            raise UserError(
                f"{where} a prompt token is outside 0..{self.config.vocab_size - 1}.",
                fix="encode the prompt with the model's own tokenizer.",
            )
        if params.max_tokens < 1:
            raise UserError(f"{where} max_tokens is {params.max_tokens}.", fix="ask for >= 1.")
        if not 0.0 <= params.temperature < float("inf"):
            raise UserError(f"{where} temperature is {params.temperature}.", fix="use >= 0.")
        if not 0.0 < params.top_p <= 1.0:
            raise UserError(f"{where} top_p is {params.top_p}.", fix="use 0 < top_p <= 1.")
        needed = self._pool.pages_for(self._max_length(request))
        if needed > self.limits.num_pages:
            raise UserError(
                f"{where} needs {needed} cache pages, the engine has {self.limits.num_pages}.",
                fix=f"raise num_pages to {needed} or lower max_tokens.",
            )

    def add(self, request: GenerateRequest) -> Sequence:
        """Queue a request; the returned handle is for `abort` and matches `step`'s results.

        Raises:
            UserError: if it could never run.
        """
        self.validate(request)
        sequence = Sequence(request, self._max_length(request), seed_key(request.params.seed))
        self._waiting.append(sequence)
        return sequence

    def abort(self, sequence: Sequence) -> Generation | None:
        """Stop a request; what it sampled so far, or None if it had already ended."""
        if sequence in self._running:
            self._running.remove(sequence)
            self._release(sequence)
        elif sequence in self._waiting:
            self._waiting.remove(sequence)
        else:
            return None
        return sequence.result(StopReason.ABORTED)

    def step(self) -> list[tuple[Sequence, Generation]]:
        """One forward over everything that can move; returns what ended with it.

        Raises:
            FloatingPointError: if the weights produce no finite logits.
        """
        self._admit()
        chunks = self._plan()
        if not chunks:
            return []
        work = [(self._running[chunk.position], chunk.num_tokens) for chunk in chunks]
        for (sequence, _), chunk in zip(work, chunks, strict=True):
            sequence.pages += [self._pool.take() for _ in range(chunk.num_new_pages)]
        with torch.inference_mode():
            hidden_TE = self._forward(work)
            return self._advance(work, hidden_TE)

    def update_weights(self, state: Mapping[str, Tensor], version: int) -> None:
        """Swap the weights. Running sequences go on over their old keys and values.

        Raises:
            UserError: if the state cannot be served; the old weights stay.
        """
        if version <= self.weight_version:
            raise UserError(
                f"weight version {version} is not newer than the served {self.weight_version}.",
                fix="publish increasing versions.",
            )
        self._model.load(state)
        self.weight_version = version
        self.forget_prefixes()

    def forget_prefixes(self) -> None:
        """Let no later request reuse keys and values that exist now."""
        self._pool.forget()
        for sequence in self._running:
            sequence.indexable = False

    def score(self, token_ids: tuple[int, ...]) -> tuple[float, ...]:
        """Log-prob of each token at temperature 1, by the prefill forward.

        Raises:
            UserError: if the tokens do not fit the model.
        """
        context, vocabulary = self.config.max_position_embeddings, self.config.vocab_size
        if len(token_ids) > context or not all(0 <= t < vocabulary for t in token_ids):
            raise UserError(
                f"{len(token_ids)} tokens to score do not fit context {context}, "
                f"vocabulary {vocabulary}.",
                fix="score a shorter text, encoded with the model's own tokenizer.",
            )
        return scoring.score(self._model, token_ids, self.limits.page_size)

    def check(self) -> None:
        """Assert that no page is lost or doubly owned."""
        self._pool.check([sequence.pages for sequence in self._running])

    def _max_length(self, request: GenerateRequest) -> int:
        wanted = len(request.prompt_ids) + request.params.max_tokens
        return min(wanted, self.config.max_position_embeddings)

    def _admit(self) -> None:
        passed: list[Sequence] = []
        pending = sum(s.num_pending for s in self._running)
        while self._waiting and pending < self.limits.budget_tokens:
            sequence = self._waiting.popleft()
            # The last token is always computed: its hidden state gives the next one.
            match = self._pool.match(sequence.tokens, len(sequence.tokens) - 1)
            if self._is_being_computed(sequence, match.num_tokens):
                passed.append(sequence)
                continue
            if not self._fits(sequence, match):
                # The page being copied may be the very one that is missing.
                match = match.without_tail()
            if not self._fits(sequence, match):
                passed.append(sequence)
                break
            self._start(sequence, match)
            pending += sequence.num_pending
        self._waiting.extendleft(reversed(passed))

    def _fits(self, sequence: Sequence, match: Match) -> bool:
        return may_admit(
            new_pages=self._pool.pages_for(len(sequence.tokens)) - len(match.pages),
            locked_pages=match.num_locked,
            room=self._pool.room,
            num_running=len(self._running),
            max_running=self.limits.max_running,
        )

    def _is_being_computed(self, sequence: Sequence, num_matched: int) -> bool:
        """Whether a running prompt is about to fill the very page that this one needs next."""
        end = num_matched - num_matched % self.limits.page_size + self.limits.page_size
        end = min(end, len(sequence.tokens) - 1)
        return end > num_matched and any(
            other.indexable
            and other.num_pending > 1
            and other.num_prompt > num_matched
            and other.tokens[:end] == sequence.tokens[:end]
            for other in self._running
        )

    def _start(self, sequence: Sequence, match: Match) -> None:
        pool = self._pool
        num_new_pages = pool.pages_for(len(sequence.tokens)) - len(match.pages)
        held = match.pages if match.tail_page is None else (*match.pages, match.tail_page)
        for page in held:
            pool.share(page)
        sequence.pages = [*match.pages, *(pool.take() for _ in range(num_new_pages))]
        if match.tail_page is not None:
            self._cache.copy_page(match.tail_page, sequence.pages[len(match.pages)])
            pool.release([match.tail_page])
        sequence.node, sequence.num_indexed_pages = match.node, len(match.pages)
        sequence.num_computed = match.num_tokens
        if not sequence.logprobs:
            sequence.cached_tokens = match.num_tokens
        self._count(cached_tokens=match.num_tokens)
        self._running.append(sequence)

    def _plan(self) -> tuple[Chunk, ...]:
        while True:
            plan = plan_step(
                [Load(s.num_pending, s.num_computed, len(s.pages)) for s in self._running],
                room=self._pool.room,
                budget_tokens=self.limits.budget_tokens,
                page_size=self.limits.page_size,
            )
            if not plan.is_short or len(self._running) <= 1:
                return plan.chunks
            newest = self._running.pop()
            self._release(newest)
            newest.rewind()
            self._waiting.appendleft(newest)
            self._count(num_preemptions=1)

    def _forward(self, work: list[tuple[Sequence, int]]) -> Tensor:
        """Hidden states [N, E] of the last token of every piece of work."""
        spans = [Span(s.pages, s.num_computed, s.num_computed + n) for s, n in work]
        ids_T = torch.tensor(
            [
                t
                for (s, _), span in zip(work, spans, strict=True)
                for t in s.tokens[span.start : span.end]
            ]
        )
        positions_T = torch.tensor([p for span in spans for p in range(span.start, span.end)])
        num_singles = sum(n == 1 for _, n in work)
        attend = attend_for(self._cache, spans, num_singles)
        hidden_TE = self._model.hidden(ids_T, positions_T, attend)
        if num_singles == len(work):
            return hidden_TE
        return hidden_TE[torch.tensor([n for _, n in work]).cumsum(0) - 1]

    def _advance(
        self, work: list[tuple[Sequence, int]], hidden_NE: Tensor
    ) -> list[tuple[Sequence, Generation]]:
        """Record what was computed; sample for those with nothing left to compute."""
        ready = []
        for row, (sequence, num_tokens) in enumerate(work):
            prompt_left = max(0, sequence.num_prompt - sequence.num_computed)
            self._count(prompt_tokens=min(num_tokens, prompt_left))
            sequence.num_computed += num_tokens
            self._index(sequence, with_tail=0 < prompt_left <= num_tokens)
            if sequence.num_pending == 0:
                ready.append(row)
        self._count(num_steps=1, sampled_tokens=len(ready))
        if not ready:
            return []
        if len(ready) < len(work):
            hidden_NE = hidden_NE[torch.tensor(ready)]
        sequences = [work[row][0] for row in ready]
        sampled = sample(self._model.logits(hidden_NE), [_draw(s) for s in sequences])
        ended = []
        for sequence, token, logprob in zip(
            sequences, sampled.tokens, sampled.logprobs, strict=True
        ):
            reason = sequence.append(token, logprob, self.weight_version)
            if reason is not None:
                ended.append((sequence, sequence.result(reason)))
        for sequence, _ in ended:
            self._running.remove(sequence)
            self._index(sequence, with_tail=True)
            self._release(sequence)
        return ended

    def _index(self, sequence: Sequence, *, with_tail: bool) -> None:
        """Make computed pages known; `with_tail` also the last, partly filled one."""
        if not sequence.indexable:
            return
        size = self.limits.page_size
        while (sequence.num_indexed_pages + 1) * size <= sequence.num_computed:
            i = sequence.num_indexed_pages
            tokens = sequence.tokens[i * size : (i + 1) * size]
            sequence.node = self._pool.index(sequence.node, sequence.pages[i], tokens)
            sequence.num_indexed_pages += 1
        start = sequence.num_indexed_pages * size
        if with_tail and start < sequence.num_computed:
            tail = sequence.tokens[start : sequence.num_computed]
            self._pool.index(sequence.node, sequence.pages[sequence.num_indexed_pages], tail)

    def _release(self, sequence: Sequence) -> None:
        self._pool.release(sequence.pages)
        sequence.pages = []

    def _count(self, **more: int) -> None:
        old = self._counters
        self._counters = old._replace(**{k: getattr(old, k) + v for k, v in more.items()})


def _draw(sequence: Sequence) -> Draw:
    params = sequence.request.params
    return Draw(params.temperature, params.top_p, uniform(sequence.seed_key, len(sequence.tokens)))
