"""The engine behind the `core.protocols.Engine` protocol: asynchronous, from any event loop."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from burnish.core.clock import Clock, SystemClock
from burnish.core.engines import EngineCapabilities
from burnish.core.errors import UserError, boundary
from burnish.core.records import GenerateRequest, Generation, GenerationDelta
from burnish.core.vocabulary import FailureKind, InFlight, SleepLevel
from burnish.model.config import ModelConfig
from burnish.model.lora import Lora, load_lora
from burnish.rollout.engine.barrier import Barrier
from burnish.rollout.engine.capabilities import local_capabilities
from burnish.rollout.engine.engine import EngineCore
from burnish.rollout.engine.grammar import GrammarCompiler
from burnish.rollout.engine.limits import CoreLimits
from burnish.rollout.engine.loop import EngineLoop
from burnish.rollout.engine.reply import Reply, Stream
from burnish.rollout.engine.speculation.opening import DraftSource
from burnish.rollout.engine.stats import EngineStats
from burnish.rollout.engine.stops import Decode
from burnish.rollout.engine.ticket import Call, Ticket
from burnish.rollout.engine.weights import Prepared


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
        decode: Decode | None = None,
        grammars: GrammarCompiler | None = None,
        draft: DraftSource | None = None,
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
            clock: for latencies and the busy ratio.
            decode: tokens to text; requests may have stop strings only with it.
            grammars: requests may have grammars only with it.
            draft: a model that guesses, if `limits.speculation` wants one.

        Raises:
            UserError: if the weights do not fit the configuration.
        """
        clock = clock or SystemClock()
        self._core = EngineCore(
            config,
            state,
            version=version,
            dtype=dtype,
            limits=limits,
            decode=decode,
            grammars=grammars,
            draft=draft,
            # With a barrier nothing may depend on the wall clock.
            clock=clock if barrier is None else None,
        )
        self.capabilities: EngineCapabilities = local_capabilities(
            config,
            self._core.limits,
            can_decode=decode is not None,
            has_grammars=grammars is not None,
        )
        self._loop = EngineLoop(
            self._core,
            num_threads=num_threads,
            barrier=barrier,
            max_outstanding=max_outstanding,
            clock=clock,
        )

    @property
    def weight_version(self) -> int:
        """Version of the weights that answer now."""
        return self._core.weight_version

    async def generate(self, request: GenerateRequest) -> Generation:
        """Sample one continuation; cancelling the caller aborts the request.

        Raises:
            UserError: if the request could never run.
            ClassifiedFailure: of kind `infra`, if its logits are not finite, or the engine failed,
                is closed or is overloaded.
        """
        reply: Reply[Generation] = Reply(asyncio.get_running_loop())
        ticket = self._submit(request, reply)
        try:
            return await reply.future
        except asyncio.CancelledError:
            self._loop.abort(ticket)
            raise

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[GenerationDelta, None]:
        """Sample one continuation, step by step; the last delta carries the whole of it.

        Closing the iterator aborts the request. With a barrier there is one delta, at the end.

        Raises:
            UserError: if the request could never run.
            ClassifiedFailure: as `generate` does.
        """
        stream = Stream(asyncio.get_running_loop())
        ticket = self._submit(request, stream)
        try:
            is_over = False
            while not is_over:
                delta = await stream.next()
                is_over = delta.generation is not None
                yield delta
        finally:
            self._loop.abort(ticket)

    async def score(self, token_ids: Seq[int]) -> tuple[float, ...]:
        """Log-prob of each token given those before it, temperature 1; the first is 0.0.

        Raises:
            UserError: if the tokens do not fit the model, or it sleeps without weights.
            ClassifiedFailure: of kind `infra`, if the engine failed or is closed.
        """
        ids = tuple(token_ids)
        scores: tuple[float, ...] = await self._call(lambda: self._core.score(ids))
        return scores

    async def update_weights(
        self, state: Mapping[str, Any], version: int, inflight: InFlight = InFlight.KEEP
    ) -> None:
        """Swap weights between two steps.

        They are checked and packed beside the running batch, which stands still only for the swap;
        until then both weights are in memory. `state` must not change until this returns.

        Raises:
            UserError: if the state cannot be served; the old weights stay.
            ClassifiedFailure: of kind `infra`, if the engine failed or is closed.
        """
        prepared = await self._prepare(state)
        retired: list[Prepared | None] = []

        def run() -> None:
            retired.append(self._core.served)
            self._loop.deliver(self._core.update_weights(prepared, version, inflight))

        await self._call(run)
        # Giving 400 MB back takes as long as several steps: not on the engine's thread.
        await asyncio.to_thread(retired.clear)

    async def update_draft(self, state: Mapping[str, Any]) -> None:
        """Give the draft model weights made for the served version.

        One whose weights are all the served model's own follows its updates by itself. Another
        stands aside after an update until it gets some, unless `SpeculationLimits.max_lag` allows
        for more.

        Raises:
            UserError: if there is none, or they do not fit; the old ones stay.
        """
        await self._call(lambda: self._core.update_draft(state))

    async def add_adapter(
        self,
        name: str,
        lora: Lora,
        version: int | None = None,
        inflight: InFlight = InFlight.KEEP,
    ) -> None:
        """Let requests name a LoRA adapter; a name that is known gets new weights.

        `inflight` says what becomes of its running requests. Their tokens carry `version`, or the
        model's if that is newer.

        Raises:
            UserError: if it does not fit the model or is not finite, if the name is empty, or the
                version not newer than its last.
        """
        with boundary(FailureKind.INFRA, "rollout.engine: packing an adapter"):
            layers = await asyncio.to_thread(self._core.adapt, lora)
        core = self._core

        def run() -> None:
            served = core.weight_version if version is None else version
            self._loop.deliver(core.adapters.add(name, layers, served, inflight))

        await self._call(run)

    async def load_adapter(
        self,
        name: str,
        directory: Path,
        version: int | None = None,
        inflight: InFlight = InFlight.KEEP,
    ) -> None:
        """As `add_adapter`, from a folder that PEFT's `save_pretrained` wrote.

        Raises:
            UserError: as `add_adapter`, or it is not plain LoRA of this model.
        """
        lora = await asyncio.to_thread(load_lora, directory, self._core.config)
        await self.add_adapter(name, lora, version, inflight)

    async def remove_adapter(self, name: str) -> None:
        """Forget an adapter and its pins; its running requests end as aborted.

        Raises:
            UserError: if it is not known.
        """
        await self._call(lambda: self._loop.deliver(self._core.adapters.remove(name)))

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the adapters that requests may use."""
        return self._core.adapters.names

    async def pause(self) -> None:
        """Stand still after the present step (with a barrier: wave). Idempotent."""
        await self._call(lambda: self._set_paused(True))

    async def resume(self) -> None:
        """Go on after `pause`. Idempotent.

        Raises:
            UserError: if the engine sleeps.
        """
        await self._call(lambda: self._set_paused(False))

    async def sleep(self, level: SleepLevel = SleepLevel.CACHE) -> None:
        """Pause and give memory back. Requests keep their tokens and go on after `wake`."""

        def run() -> None:
            self._core.sleep(level)
            self._loop.is_paused = True

        await self._call(run)

    async def wake(self, state: Mapping[str, Any] | None = None) -> None:
        """Take memory again and go on; `state` must be the weights that were served.

        Raises:
            UserError: if weights are missing or are others; it sleeps on.
        """
        prepared = None if state is None else await self._prepare(state)

        def run() -> None:
            self._core.wake(prepared)
            self._loop.is_paused = False

        await self._call(run)

    async def adopt(self, tokens: Seq[int], layers: Seq[tuple[Any, Any]]) -> int:
        """Take over keys and values of a prefix that `ring.RingPrefill` computed.

        They must come from the weights served now. Returns how many tokens there was room for.

        Raises:
            UserError: if this engine must compute them itself.
        """
        ids = tuple(tokens)
        num_tokens: int = await self._call(lambda: self._core.adopt(ids, layers))
        return num_tokens

    async def pin(self, prefix_ids: Seq[int], adapter: str | None = None) -> int:
        """Keep a prefix, such as a system prompt, in the cache from its first use on.

        It survives weight updates (its pages are computed anew at the next use). Pins give way
        only where a request could not run otherwise. Returns a number for `unpin`.
        """
        ids = tuple(prefix_ids)
        number: int = await self._call(lambda: self._core.pin(ids, adapter))
        return number

    async def unpin(self, number: int) -> None:
        """Leave a pinned prefix to eviction again."""
        await self._call(lambda: self._core.unpin(number))

    async def close(self) -> None:
        """Answer what is pending as aborted, stop the thread and wait for it. Idempotent."""
        self._loop.close()
        while self._loop.is_alive:
            await asyncio.to_thread(self._loop.join)

    def stats(self) -> EngineStats:
        """A snapshot."""
        core, meter = self._core, self._loop.meter
        counters, uptime_s, busy_s = core.counters, meter.uptime_s, meter.busy_s
        return EngineStats(
            busy_ratio=busy_s / uptime_s if uptime_s > 0 else 0.0,
            busy_s=busy_s,
            tokens_per_busy_s=counters.sampled_tokens / busy_s if busy_s > 0 else 0.0,
            **counters._asdict(),
            num_outstanding=self._loop.num_outstanding,
            num_running=core.num_running,
            num_waiting=core.num_waiting,
            free_pages=core.free_pages,
            num_pages=core.limits.num_pages,
            used_page_ratio=1.0 - core.free_pages / core.limits.num_pages,
            saved_bytes=core.saved_bytes,
            num_adapters=len(core.adapters.names),
            tier=core.tier,
            queue=meter.queue.snapshot(),
            first_token=meter.first_token.snapshot(),
            inter_token=meter.inter_token.snapshot(),
        )

    def _submit(self, request: GenerateRequest, sink: Reply[Generation] | Stream) -> Ticket:
        self._core.validate(request)
        ticket = Ticket(request, sink, self._loop.meter.now_s())
        self._loop.submit(ticket)
        return ticket

    def _set_paused(self, paused: bool) -> None:
        if not paused and self._core.is_asleep:
            raise UserError("the engine sleeps.", fix="wake it.")
        self._loop.is_paused = paused

    async def _prepare(self, state: Mapping[str, Any]) -> Prepared:
        with boundary(FailureKind.INFRA, "rollout.engine: packing weights"):
            return await asyncio.to_thread(self._core.prepare, state)

    async def _call(self, run: Callable[[], Any]) -> Any:
        reply: Reply[Any] = Reply(asyncio.get_running_loop())
        self._loop.call(Call(run, reply))
        return await reply.future
