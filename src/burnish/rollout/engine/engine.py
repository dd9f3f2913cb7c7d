"""The inference core: add requests, step, take what is finished. Synchronous, one thread.

    add -> waiting -> admit (match prefix, take pages) -> running -> step -> ended
                ^                                            |
                '---- preempt (pages to host memory, or given back)

A step computes one token for every decoding sequence (more where guesses are checked) and chunks of
prompts, in one forward. What
goes wrong with one request ends that request; what goes wrong with the machine is raised.
"""

from collections.abc import Mapping
from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from burnish.core.clock import Clock
from burnish.core.errors import UserError
from burnish.core.records import GenerateRequest, Generation
from burnish.core.vocabulary import InFlight, SleepLevel, StopReason
from burnish.model.config import ModelConfig
from burnish.model.lora import LayerDeltas, Lora
from burnish.rollout.engine import score as scoring
from burnish.rollout.engine.adapter_service import Adapters
from burnish.rollout.engine.adapters import AdapterSet
from burnish.rollout.engine.argument_types import check_version, member
from burnish.rollout.engine.cache.storage import KvCache
from burnish.rollout.engine.checksum import digest
from burnish.rollout.engine.grammar import GrammarCompiler
from burnish.rollout.engine.inflight import everyone, settle
from burnish.rollout.engine.limits import CoreCounters, CoreLimits
from burnish.rollout.engine.long.policy import KvPolicy
from burnish.rollout.engine.placement import find_device
from burnish.rollout.engine.residency import Residency
from burnish.rollout.engine.ring.adoption import adopt
from burnish.rollout.engine.sampler import seed_key
from burnish.rollout.engine.scheduler import Scheduler
from burnish.rollout.engine.sequence import Sequence
from burnish.rollout.engine.speculation.bodies import DraftModel
from burnish.rollout.engine.speculation.opening import DraftSource, Served, open_speculator
from burnish.rollout.engine.stepper import Ended, Stepper
from burnish.rollout.engine.stops import Decode, StopText
from burnish.rollout.engine.tier.cache import TieredCache
from burnish.rollout.engine.tier.limits import TierStats
from burnish.rollout.engine.tier.opening import open_engine_cache
from burnish.rollout.engine.validation import Bounds, check_ids, validate
from burnish.rollout.engine.weights import Prepared, ServedModel


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
        grammars: GrammarCompiler | None = None,
        draft: DraftSource | None = None,
        clock: Clock | None = None,
    ) -> None:
        """Copy the weights and lay out the cache.

        Args:
            config: architecture.
            state: named as `Decoder.state_dict()`; copied.
            version: weight version of `state`.
            dtype: of weights and cache; the head is always fp32.
            limits: sizes.
            decode: tokens to text, for stop strings.
            grammars: compiles the grammars of requests.
            draft: a model that guesses, if `limits.speculation` wants one.
            clock: measures what guesses cost; without it the decision uses assumed costs.

        Raises:
            UserError: if the weights do not fit, or `limits` ask for what is not possible.
        """
        self.config, self.limits, self.dtype = config, limits or CoreLimits(), dtype
        self.limits.check()
        self._device = find_device(self.limits.device)
        self.limits.kv.check(self.limits.page_size, config.sliding_window)
        self.weight_version = version
        self._decode = decode
        self._grammars, known = grammars, AdapterSet()
        self._bounds = Bounds(config, self.limits, decode is not None, grammars, known)
        self._draft: DraftModel | None = None
        self._served: Prepared | None = self.prepare(state)
        self._digest = self._served.digest
        self._cache: KvCache | None = self._new_cache()
        self._past_tier = TierStats()
        if isinstance(self._cache, TieredCache):
            self._bounds = self._bounds._replace(attended_pages=self._cache.num_frames // 2)
        flops = 2.0 * sum(tensor.numel() for tensor in state.values())
        memory = Residency(self._cache, self.limits, version=version, flops_per_token=flops)
        self._scheduler = Scheduler(memory, self.limits)
        self.adapters = Adapters(known, self._scheduler)
        """Those that requests can name."""
        target = Served(config, dtype, version, self._device, state)
        self._speculator, self._draft = open_speculator(
            self.limits.speculation, target, draft, clock
        )
        self._stepper = Stepper(self._scheduler, self._speculator, clock)

    @property
    def counters(self) -> CoreCounters:
        """Totals since the start."""
        return self._stepper.counters

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
        """Those that wait."""
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
        params, stop_text, grammar = request.params, None, None
        stops = self._bounds.stops(params)
        if params.stop:
            assert self._decode is not None
            stop_text = StopText(params.stop, self._decode)
        if params.grammar is not None:
            assert self._grammars is not None
            grammar = self._grammars.compile(params.grammar, stops)
        sequence = Sequence(
            request,
            self._bounds.max_length(request),
            seed_key(params.seed),
            stop_text,
            grammar,
            self.adapters.get(request.adapter),
        )
        sequence.stops = stops
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
        return self._stepper.step(self._served.model, self._cache, self.weight_version)

    def prepare(self, state: Mapping[str, Tensor]) -> Prepared:
        """Check and pack weights. Touches nothing that is served: safe from any thread.

        Raises:
            UserError: if the state cannot be served.
        """
        exact = self.limits.exact
        model = ServedModel(self.config, state, self.dtype, exact=exact, device=self._device)
        draft = None if self._draft is None else self._draft.part_of(state)
        return Prepared(model, digest(state, self.dtype), draft)

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
        inflight = member(InFlight, inflight)
        check_version(version)
        if version <= self.weight_version:
            raise UserError(
                f"weight version {version} is not newer than the served {self.weight_version}.",
                fix="publish increasing versions.",
            )
        prepared = state if isinstance(state, Prepared) else self.prepare(state)
        self._serve(prepared)
        self.weight_version = version
        if self._draft is not None and prepared.draft is not None:
            self._draft.follow(prepared.draft, version)
        ended = settle(self._scheduler, everyone(self._scheduler), inflight)
        self.forget_prefixes()
        return [*ended]

    def update_draft(self, state: Mapping[str, Tensor]) -> None:
        """Give the draft model weights made for the served version.

        Raises:
            UserError: if there is none, or they do not fit; the old ones stay.
        """
        if self._draft is None:
            raise UserError(
                "the engine has no draft model.", fix='start it with speculation = "draft".'
            )
        self._draft.update(state, self.weight_version)

    def adapt(self, lora: Lora) -> list[LayerDeltas]:
        """Prepare an adapter for `adapters.add`. Touches nothing that is served.

        Raises:
            UserError: if the engine sleeps without weights.
        """
        return self._awake().adapt(lora)

    def adopt(self, tokens: tuple[int, ...], layers: Seq[tuple[Tensor, Tensor]]) -> int:
        """Take over keys and values of a prefix, computed by the present weights elsewhere.

        Requests find them in the prefix index; returns how many tokens there was room for.

        Raises:
            UserError: if the engine must compute them itself.
        """
        if self._cache is None:
            raise UserError("the engine sleeps: it has no cache to fill.", fix="wake it first.")
        return adopt(self._cache, self._scheduler.memory, tokens, layers, self.limits)

    def forget_prefixes(self) -> None:
        """Let no later request reuse keys and values that exist now."""
        self._scheduler.memory.forget(self.weight_version)

    def forget_sessions(self) -> None:
        """Let no later request count as the next turn of an earlier one, or be guessed like it."""
        self._scheduler.waiting.forget_sessions()
        if self._speculator is not None:
            self._speculator.forget()

    def pin(self, prefix_ids: tuple[int, ...], adapter: str | None = None) -> int:
        """Keep a prefix in the cache once it is computed, over weight updates too.

        Pins give way only where a request could not run otherwise. Returns a number for `unpin`.

        Raises:
            UserError: if it is no prefix of any request, or the adapter is not known.
        """
        check_ids("the pinned prefix", prefix_ids, self.config.vocab_size)
        served = self.adapters.get(adapter)
        return self._scheduler.memory.pin(prefix_ids, served and served.key)

    def unpin(self, number: int) -> None:
        """Leave a prefix to eviction again."""
        self._scheduler.memory.unpin(number)

    def sleep(self, level: SleepLevel) -> None:
        """Give memory back. Requests keep their tokens and go on after `wake`."""
        scheduler, level = self._scheduler, member(SleepLevel, level)
        for sequence in everyone(scheduler):
            scheduler.restart(sequence)
        if self._speculator is not None:
            self._speculator.drafter.release()
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

    def attend_by(self, kv: KvPolicy) -> None:
        """Change what tokens attend from the next step on; `limits` stay those of the opening.

        Raises:
            UserError: if the cache was not opened for it, or the policy does not fit the sizes.
        """
        limits = self.limits.attending_by(kv)
        kv.check(limits.page_size, self.config.sliding_window)
        self._scheduler.limits, self._bounds = limits, self._bounds._replace(limits=limits)

    def score(self, token_ids: tuple[int, ...]) -> tuple[float, ...]:
        """Log-prob of each token at temperature 1, by the prefill forward.

        Raises:
            UserError: if the tokens do not fit the model, or there are no weights.
        """
        scoring.check(self.config, token_ids)
        return scoring.score(self._awake(), token_ids, self.limits.page_size)

    def close(self) -> None:
        """Give back the cache, on disk too, and threads."""
        self._stepper.masks.close()
        if self._cache is not None:
            past = self.tier._replace(ram_bytes=0, disk_bytes=0)
            self._cache.close()
            self._cache, self._past_tier = None, past

    @property
    def tier(self) -> TierStats:
        """What lies in memory and on disk, where the cache has both."""
        cache = self._cache
        if isinstance(cache, TieredCache):
            return cache.stats.after(self._past_tier)
        return self._past_tier

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

    def _awake(self) -> ServedModel:
        if self._served is None:
            raise UserError("the engine sleeps without weights.", fix="wake it first.")
        return self._served.model
