"""The inference core: add requests, step, take what is finished. Synchronous, one thread.

    add -> waiting -> admit (match prefix, take pages) -> running -> step -> ended
                ^                                            |
                '---- preempt (pages to host memory, or given back)

A step computes one token for every decoding sequence and chunks of prompts, in one forward. What
goes wrong with one request ends that request; what goes wrong with the machine is raised.
"""

from collections.abc import Mapping
from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from burnish.core.errors import ClassifiedFailure, UserError
from burnish.core.records import Failure, GenerateRequest, Generation
from burnish.core.vocabulary import FailureKind, InFlight, SleepLevel, StopReason
from burnish.model.config import ModelConfig
from burnish.rollout.engine import batch
from burnish.rollout.engine import score as scoring
from burnish.rollout.engine.batch import Work
from burnish.rollout.engine.cache.storage import KvCache
from burnish.rollout.engine.checksum import digest
from burnish.rollout.engine.limits import CoreCounters, CoreLimits
from burnish.rollout.engine.residency import Residency
from burnish.rollout.engine.ring.adoption import adopt
from burnish.rollout.engine.sampler import Sampled, seed_key
from burnish.rollout.engine.scheduler import Scheduler
from burnish.rollout.engine.sequence import Sequence
from burnish.rollout.engine.stops import Decode, StopText
from burnish.rollout.engine.tier.cache import TieredCache
from burnish.rollout.engine.tier.limits import TierStats
from burnish.rollout.engine.tier.losses import lost_requests
from burnish.rollout.engine.tier.opening import open_engine_cache
from burnish.rollout.engine.validation import Bounds, validate
from burnish.rollout.engine.weights import Prepared, ServedModel

Ended = list[tuple[Sequence, Generation | Failure]]


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
        decode: Decode | None = None,
    ) -> None:
        """Copy the weights and lay out the cache.

        Args:
            config: architecture.
            state: named as `Decoder.state_dict()`; copied.
            version: weight version of `state`.
            dtype: of weights and cache; the head is always fp32.
            limits: sizes.
            decode: tokens to text, for stop strings.

        Raises:
            UserError: if the weights do not fit the configuration, or `limits` ask to be exact and
                that is not possible.
        """
        self.config, self.limits, self.dtype = config, limits or CoreLimits(), dtype
        self.limits.check()
        self.limits.kv.check(self.limits.page_size, config.sliding_window)
        self.weight_version = version
        self._decode = decode
        self._bounds = Bounds(config, self.limits, decode is not None)
        self._served: Prepared | None = self.prepare(state)
        self._digest = self._served.digest
        self._cache: KvCache | None = self._new_cache()
        if isinstance(self._cache, TieredCache):
            self._bounds = self._bounds._replace(attended_pages=self._cache.num_frames // 2)
        flops = 2.0 * sum(tensor.numel() for tensor in state.values())
        memory = Residency(self._cache, self.limits, version=version, flops_per_token=flops)
        self._scheduler = Scheduler(memory, self.limits)
        self._sampled_tokens = self._prompt_tokens = self._num_failed = 0

    @property
    def counters(self) -> CoreCounters:
        """Totals since the start."""
        scheduler = self._scheduler
        return CoreCounters(
            num_steps=scheduler.num_steps,
            sampled_tokens=self._sampled_tokens,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=scheduler.cached_tokens,
            num_preemptions=scheduler.num_preemptions,
            num_swaps=scheduler.num_swaps,
            num_failed=self._num_failed,
        )

    @property
    def has_work(self) -> bool:
        """Whether `step` would do anything."""
        return bool(self._scheduler.running or self._scheduler.waiting)

    @property
    def running(self) -> Seq[Sequence]:
        """The batch, in order of service."""
        return self._scheduler.running

    @property
    def num_running(self) -> int:
        """Sequences in the batch."""
        return len(self._scheduler.running)

    @property
    def num_waiting(self) -> int:
        """Sequences that are not."""
        return len(self._scheduler.waiting)

    @property
    def free_pages(self) -> int:
        """Pages that can be handed out."""
        return self._scheduler.memory.pool.room

    @property
    def saved_bytes(self) -> int:
        """Host memory that holds pages of preempted sequences."""
        return self._scheduler.memory.saved_bytes

    @property
    def served(self) -> Prepared | None:
        """The weights that answer now; None while they are given back."""
        return self._served

    @property
    def is_asleep(self) -> bool:
        """Whether the cache's memory is given back."""
        return self._cache is None

    def validate(self, request: GenerateRequest) -> None:
        """Refuse a request that could never run. Touches no state: safe from any thread.

        Raises:
            UserError: naming the value and its bound.
        """
        validate(request, self._bounds)

    def add(self, request: GenerateRequest) -> Sequence:
        """Queue a request; the returned handle is for `abort` and matches `step`'s results.

        Raises:
            UserError: if it could never run.
        """
        self.validate(request)
        stop_text = None
        if request.params.stop:
            assert self._decode is not None
            stop_text = StopText(request.params.stop, self._decode)
        length = self._bounds.max_length(request)
        sequence = Sequence(request, length, seed_key(request.params.seed), stop_text)
        self._scheduler.add(sequence)
        return sequence

    def abort(self, sequence: Sequence) -> Generation | None:
        """Stop a request; what it sampled so far, or None if it had already ended."""
        if not self._scheduler.remove(sequence):
            return None
        return sequence.result(StopReason.ABORTED)

    def step(self) -> Ended:
        """One forward over everything that can move; returns what ended with it."""
        assert self._served is not None, "a sleeping engine was asked to work"
        assert self._cache is not None, "a sleeping engine was asked to work"
        work = self._scheduler.next_work()
        if not work:
            return []
        model = self._served.model
        with torch.inference_mode():
            hidden_TE = batch.forward(model, self._cache, work, self.limits.kv)
            losses = self._cache.take_losses()
            broken = dict.fromkeys(batch.prompt_logprobs(model, hidden_TE, work), _NOT_FINITE)
            broken |= lost_requests(losses, work)
            self._scheduler.restart_holders(losses.pages, work)
            self._prompt_tokens += sum(
                min(n, max(0, s.num_prompt - s.num_computed)) for s, n in work
            )
            self._scheduler.computed(work)
            ended: Ended = [(each, self._fail(each, failure)) for each, failure in broken.items()]
            ready = [
                i
                for i, (sequence, _) in enumerate(work)
                if sequence.num_pending == 0 and sequence not in broken
            ]
            return ended + self._sample(model, hidden_TE, work, ready)

    def prepare(self, state: Mapping[str, Tensor]) -> Prepared:
        """Check and pack weights. Touches nothing that is served: safe from any thread.

        Raises:
            UserError: if the state cannot be served.
        """
        return Prepared(
            ServedModel(self.config, state, self.dtype, exact=self.limits.exact),
            digest(state, self.dtype),
        )

    def update_weights(
        self,
        state: Mapping[str, Tensor] | Prepared,
        version: int,
        inflight: InFlight = InFlight.KEEP,
    ) -> Ended:
        """Swap the weights; returns what `inflight` ended.

        Running sequences go on over their old keys and values, compute them again, or end. Prompt
        log-probs come from one version: a prompt that is still being read is read again.

        Raises:
            UserError: if the state cannot be served; the old weights stay.
        """
        if version <= self.weight_version:
            raise UserError(
                f"weight version {version} is not newer than the served {self.weight_version}.",
                fix="publish increasing versions.",
            )
        self._serve(state if isinstance(state, Prepared) else self.prepare(state))
        self.weight_version = version
        ended: Ended = []
        scheduler = self._scheduler
        for sequence in [*scheduler.running, *scheduler.waiting]:
            started = bool(sequence.num_computed or sequence.num_sampled)
            if inflight is InFlight.ABORT and started:
                scheduler.remove(sequence)
                ended.append((sequence, sequence.result(StopReason.ABORTED)))
            elif inflight is InFlight.RECOMPUTE or sequence.wants_prompt:
                scheduler.restart(sequence)
            if sequence.wants_prompt:
                sequence.prompt_logprobs = []
        self.forget_prefixes()
        return ended

    def adopt(self, tokens: tuple[int, ...], layers: Seq[tuple[Tensor, Tensor]]) -> int:
        """Take over keys and values of a prefix, computed by the present weights elsewhere.

        Requests find them in the prefix index; returns how many tokens there was room for.

        Raises:
            UserError: if the engine must compute them itself.
        """
        assert self._cache is not None, "a sleeping engine was asked to work"
        return adopt(self._cache, self._scheduler.memory, tokens, layers, self.limits)

    def forget_prefixes(self) -> None:
        """Let no later request reuse keys and values that exist now."""
        self._scheduler.memory.forget(self.weight_version)

    def forget_sessions(self) -> None:
        """Let no later request count as the next turn of an earlier one."""
        self._scheduler.waiting.forget_sessions()

    def pin(self, prefix_ids: tuple[int, ...], adapter: str | None = None) -> int:
        """Keep a prefix in the cache once it is computed, over weight updates too.

        Pins give way only where a request could not run otherwise. Returns a number for `unpin`.
        """
        return self._scheduler.memory.pin(prefix_ids, adapter)

    def unpin(self, number: int) -> None:
        """Leave a prefix to eviction again."""
        self._scheduler.memory.unpin(number)

    def sleep(self, level: SleepLevel) -> None:
        """Give memory back. Requests keep their tokens and go on after `wake`."""
        scheduler = self._scheduler
        for sequence in [*scheduler.running, *scheduler.waiting]:
            scheduler.restart(sequence)
        self.forget_prefixes()
        scheduler.memory.attach(None)
        self.close()
        if level is SleepLevel.WEIGHTS:
            self._served = None

    def wake(self, state: Mapping[str, Tensor] | Prepared | None = None) -> None:
        """Take memory again.

        Raises:
            UserError: if weights are missing or are not those that were served; it sleeps on.
        """
        if state is not None:
            prepared = state if isinstance(state, Prepared) else self.prepare(state)
            if prepared.digest != self._digest:
                raise UserError(
                    f"the weights given to wake are not those of version {self.weight_version}.",
                    fix="give the same weights, or publish others with update_weights first.",
                )
            self._serve(prepared)
        if self._served is None:
            raise UserError(
                "the engine gave its weights back when it went to sleep.",
                fix="wake it with the weights, or publish new ones with update_weights first.",
            )
        if self._cache is None:
            self._cache = self._new_cache()
            self._scheduler.memory.attach(self._cache)

    def score(self, token_ids: tuple[int, ...]) -> tuple[float, ...]:
        """Log-prob of each token at temperature 1, by the prefill forward.

        Raises:
            UserError: if the tokens do not fit the model, or there are no weights.
        """
        scoring.check(self.config, token_ids)
        if self._served is None:
            raise UserError("the engine sleeps without weights.", fix="wake it first.")
        return scoring.score(self._served.model, token_ids, self.limits.page_size)

    def close(self) -> None:
        """Give back the cache, on disk too."""
        if self._cache is not None:
            self._cache.close()
            self._cache = None

    @property
    def tier(self) -> TierStats:
        """What lies in memory and on disk, where the cache has both."""
        return self._cache.stats if isinstance(self._cache, TieredCache) else TierStats()

    def check(self) -> None:
        """Assert that no page is lost or doubly owned."""
        self._scheduler.check()

    def _new_cache(self) -> KvCache:
        return open_engine_cache(
            self.config,
            self.dtype,
            self.limits,
            lambda page: self._scheduler.memory.pool.is_free(page),
        )

    def _serve(self, prepared: Prepared) -> None:
        self._served, self._digest = prepared, prepared.digest

    def _sample(
        self, model: ServedModel, hidden_TE: Tensor, work: list[Work], ready: list[int]
    ) -> Ended:
        """Draw for the pieces of work that computed the last known token of their sequence."""
        ended: Ended = []
        drawing = []
        for i in ready:
            sequence = work[i].sequence
            if sequence.request.params.max_tokens == 0:
                ended.append((sequence, self._finish(sequence, StopReason.LENGTH)))
            else:
                drawing.append(i)
        if not drawing:
            return ended
        sequences = [work[i].sequence for i in drawing]
        sampled = batch.sample_next(model, batch.last_rows(hidden_TE, work, drawing), sequences)
        for row, sequence in enumerate(sequences):
            outcome = self._take(sequence, sampled, row)
            if outcome is not None:
                ended.append((sequence, outcome))
        return ended

    def _take(self, sequence: Sequence, sampled: Sampled, row: int) -> Generation | Failure | None:
        """Give a sequence its token; what became of it, if that ended it."""
        if row in sampled.broken:
            return self._fail(sequence, _NOT_FINITE)
        self._sampled_tokens += 1
        try:
            reason = sequence.append(
                sampled.tokens[row], sampled.logprobs[row], self.weight_version, sampled.tops[row]
            )
        except ClassifiedFailure as error:
            return self._fail(sequence, error.failure)
        return None if reason is None else self._finish(sequence, reason)

    def _finish(self, sequence: Sequence, reason: StopReason) -> Generation:
        self._scheduler.end(sequence)
        if self.limits.kv.is_sparse and self.limits.kv.report_gap and sequence.num_sampled:
            assert self._served is not None
            sequence.dense_logprobs = scoring.score_sampled(
                self._served.model, sequence, self.limits.page_size
            )
        return sequence.result(reason)

    def _fail(self, sequence: Sequence, failure: Failure) -> Failure:
        self._num_failed += 1
        self._scheduler.fail(sequence)
        return failure


_NOT_FINITE = Failure(
    kind=FailureKind.INFRA,
    where="rollout.engine",
    message="the logits of this request are not finite: weights or cache are broken",
)
