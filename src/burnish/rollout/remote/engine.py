"""Servers as one `core.protocols.Engine`.

    any event loop --generate, score, ...--> loop thread: fleet --HTTP--> replicas
          ^                                       |
          '---------- deltas, through its loop ---'

Connections live on a thread of their own: the engine may be used from any loop, and tokens are
read, and so dated, at once, also while the caller's loop is busy.
"""

import asyncio
import secrets
import shutil
import tempfile
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any, Literal, TypeVar

from burnish.core.clock import Clock, SystemClock
from burnish.core.engines import EngineCapabilities
from burnish.core.errors import UserError
from burnish.core.loop_thread import LoopThread
from burnish.core.records import GenerateRequest, Generation, GenerationDelta
from burnish.core.vocabulary import EngineFeature, InFlight, SleepLevel
from burnish.model.config import ModelConfig
from burnish.model.published import Published, publish
from burnish.rollout.engine.stats import EngineStats
from burnish.rollout.remote.adapters import OWN_PREFIX, RemoteAdapter, plain_adapter, written
from burnish.rollout.remote.capabilities import shared_capabilities
from burnish.rollout.remote.checks import refuse_ids, refuse_unfit
from burnish.rollout.remote.config import RemoteConfig
from burnish.rollout.remote.dialect import Delivery, Dialect, LogprobScope
from burnish.rollout.remote.failures import RemoteFailure, RemoteProblem
from burnish.rollout.remote.fleet import Fleet

T = TypeVar("T")
_INFLIGHT = {
    InFlight.KEEP: EngineFeature.INFLIGHT_KEEP,
    InFlight.RECOMPUTE: EngineFeature.INFLIGHT_RECOMPUTE,
    InFlight.ABORT: EngineFeature.INFLIGHT_ABORT,
}


class RemoteEngine:
    """One engine made of servers."""

    def __init__(
        self,
        config: RemoteConfig,
        dialect: Dialect,
        model: ModelConfig,
        *,
        version: int = 0,
        clock: Clock | None = None,
    ) -> None:
        """Connect to all servers and find out what they can do. Blocks: seconds, not minutes.

        Args:
            config: where they are.
            dialect: how to speak to them.
            model: architecture of the run's model, which they must serve.
            version: of the weights that they serve now.
            clock: for speeds.

        Raises:
            UserError: a URL, the token, the kind of server or its model is wrong.
            ClassifiedFailure: of kind `infra`, if one cannot be reached.
        """
        self._config, self._dialect, self._model = config, dialect, model
        self._clock = clock or SystemClock()
        self._nonce = secrets.token_hex(4)
        self._owns_folder = config.weights_directory is None
        self._folder: Path | None = config.weights_directory
        self._published: list[Path] = []
        self._num_adapters = 0
        self._asleep: SleepLevel | None = None
        self._served_digest: str | None = None
        self._closed = False
        self._started_s, self._busy_s, self._busy_since_s = self._clock.now_s(), 0.0, 0.0
        self._outstanding: set[str] = set()
        self._thread = LoopThread("burnish-remote-engine")
        try:
            self._fleet = self._thread.run_blocking(lambda: self._connect(version))
        except BaseException:
            self._thread.close()
            raise
        self._capabilities = shared_capabilities(
            f"{dialect.name} at {', '.join(config.urls)}",
            self._fleet.facts,
            self._fleet.scope,
            model.max_position_embeddings,
        )

    @property
    def capabilities(self) -> EngineCapabilities:
        """What all servers can do."""
        return self._capabilities

    @property
    def scope(self) -> LogprobScope:
        """Which distribution the log-probs belong to."""
        return self._fleet.scope

    @property
    def weight_version(self) -> int:
        """Version of the weights that answer now."""
        return self._fleet.version

    def check(self, request: GenerateRequest) -> None:
        """Refuse what could never run, or what the servers cannot do. Sends nothing.

        Raises:
            UserError: naming the value and its bound, or the feature.
        """
        refuse_unfit(request, self._capabilities, self._fleet.scope, self._model.vocab_size)
        self._fleet.adapters.get(request.adapter)

    async def generate(self, request: GenerateRequest) -> Generation:
        """Sample one continuation; cancelling the caller hangs up, and so aborts the request.

        Raises:
            UserError: if the request could never run, or asks for what the servers cannot do.
            ClassifiedFailure: of kind `infra`, if it failed, or the engine is overloaded or closed.
        """
        answer: Generation | None = None
        async with aclosing(self.stream(request)) as deltas:
            async for delta in deltas:
                answer = delta.generation
        assert answer is not None
        return answer

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[GenerationDelta, None]:
        """Sample one continuation, token by token; see `core.protocols.Engine`."""
        self.check(request)
        self._enter(request.request_id)
        loop = asyncio.get_running_loop()
        queue: asyncio.Queue[GenerationDelta | None] = asyncio.Queue()

        def put(item: GenerationDelta | None) -> None:
            # RuntimeError: the loop is closed, so nobody waits any more.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(queue.put_nowait, item)

        async def work() -> None:
            try:
                async with aclosing(self._fleet.stream(request)) as deltas:
                    async for delta in deltas:
                        put(delta)
            finally:
                put(None)

        task = asyncio.ensure_future(self._run(work))
        try:
            while (delta := await queue.get()) is not None:
                yield delta
            await self._ended(task)
        finally:
            self._leave(request.request_id)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def score(self, token_ids: Sequence[int]) -> tuple[float, ...]:
        """Log-prob of each token given those before it, temperature 1; the first is 0.0.

        All replicas are asked: their answers must agree within `agreement_nats`.

        Raises:
            UserError: if the tokens do not fit the model, or the servers cannot score.
            ClassifiedFailure: of kind `infra`, if it failed or replicas disagree.
        """
        self._capabilities.require(EngineFeature.SCORE)
        ids = tuple(token_ids)
        if not ids:
            return ()
        refuse_ids(ids, self._model.vocab_size, "score:")
        if len(ids) > self._capabilities.max_context_tokens - 1:
            raise UserError(
                f"score: {len(ids)} tokens, the servers' context is "
                f"{self._capabilities.max_context_tokens}, one of them is sampled.",
                fix="score a shorter text.",
            )
        if len(ids) == 1:
            return (0.0,)
        return await self._run(lambda: self._fleet.score(ids))

    async def update_weights(
        self, state: Mapping[str, Any], version: int, inflight: InFlight = InFlight.KEEP
    ) -> None:
        """Write the weights, have every server load them, and prove that they answer.

        Raises:
            UserError: the version is not newer, the state does not fit, or a server refuses it.
            ClassifiedFailure: of kind `infra`, if no server serves them. Servers that failed take
                no requests until they have been given the weights.
        """
        if version <= self.weight_version:
            raise UserError(
                f"weight version {version} is not newer than the served {self.weight_version}.",
                fix="publish increasing versions.",
            )
        await self._deliver(state, version, inflight)

    async def synchronize(self, state: Mapping[str, Any]) -> None:
        """Make the servers serve `state` under the present version, whatever they served before."""
        await self._deliver(state, self.weight_version, InFlight.ABORT)

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the LoRA adapters that requests may use, sorted."""
        return self._fleet.adapters.names

    async def load_adapter(self, name: str, directory: Path, version: int | None = None) -> None:
        """Have every server load a LoRA adapter; see `core.protocols.Engine`.

        What is running goes on with the weights that it began with.

        Raises:
            UserError: it is not plain LoRA of this model, the version not newer than its last, its
                rank beyond what the servers take, or they refuse it.
            ClassifiedFailure: of kind `infra`, if no server serves it.
        """
        self._capabilities.require(EngineFeature.LOAD_ADAPTERS)
        if self._closed:
            raise self._closed_failure()
        served = self.weight_version if version is None else version
        self._fleet.adapters.check_new(name, served)
        self._num_adapters += 1
        number = f"{self._nonce}-{self._num_adapters}"
        plain = RemoteAdapter(name, OWN_PREFIX + number, served)
        folder = (self._directory() / f"adapter-{number}").absolute()
        most = self._capabilities.max_adapter_rank
        adapter = await asyncio.to_thread(written, plain, directory, folder, self._model, most)
        await self._run(lambda: self._fleet.load_adapter(adapter))

    async def remove_adapter(self, name: str) -> None:
        """Forget an adapter; what is running goes on to its end.

        Raises:
            UserError: it is not known, or the servers were started with it.
        """
        self._capabilities.require(EngineFeature.LOAD_ADAPTERS)
        await self._run(lambda: self._fleet.remove_adapter(name))

    async def pause(self) -> None:
        """Stand still; requests in flight stay on the servers. Idempotent."""
        self._capabilities.require(EngineFeature.PAUSE)
        await self._run(self._fleet.pause)

    async def resume(self) -> None:
        """Go on. Idempotent."""
        self._capabilities.require(EngineFeature.PAUSE)
        await self._run(self._fleet.resume)

    async def sleep(self, level: SleepLevel = SleepLevel.CACHE) -> None:
        """Let running requests end, hold new ones back, and give the servers' memory back."""
        self._capabilities.require(EngineFeature.SLEEP)
        if self._asleep is None:
            self._asleep = level
            await self._run(lambda: self._fleet.sleep(level))

    async def wake(self, state: Mapping[str, Any] | None = None) -> None:
        """Take memory again and let requests go; see `core.protocols.Engine`."""
        self._capabilities.require(EngineFeature.SLEEP)
        level = self._asleep
        if level is None:
            return
        published = None
        if level is SleepLevel.WEIGHTS:
            if state is None:
                raise UserError(
                    "the engine sleeps without weights.", fix="call wake(state) with them."
                )
            published = await self._write(state, self.weight_version)
            if self._served_digest not in (None, published.digest):
                raise UserError(
                    "these weights are not those that were served before.",
                    fix=f"wake with the weights of version {self.weight_version}.",
                )
        await self._run(lambda: self._fleet.wake(level))
        if published is not None:
            await self._send(published, self.weight_version, InFlight.ABORT)
            await self._run(self._fleet.restore_adapters)
        self._asleep = None
        await self._run(self._fleet.rouse)

    async def close(self) -> None:
        """Hang up; what runs is ended as failed. Idempotent. The servers go on."""
        if self._closed:
            return
        self._closed = True
        try:
            await self._thread.run(self._fleet.close)
        finally:
            await asyncio.to_thread(self._thread.close)
            if self._owns_folder and self._folder is not None:
                await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)

    def stats(self) -> EngineStats:
        """A snapshot, as seen from here; what servers do not tell is None."""
        now_s = self._clock.now_s()
        return self._fleet.counters.snapshot(
            uptime_s=now_s - self._started_s,
            busy_s=self._busy_s + (now_s - self._busy_since_s if self._outstanding else 0.0),
            num_outstanding=len(self._outstanding),
            num_adapters=len(self.adapters),
        )

    async def _connect(self, version: int) -> Fleet:
        fleet = Fleet(self._config, self._dialect, self._clock, version=version, salt=self._salt)
        try:
            await fleet.connect()
            if any(facts.needs_plain_adapter for facts in fleet.facts):
                name = f"{OWN_PREFIX}{self._nonce}-plain"
                folder = (self._directory() / name).absolute()
                plain = await asyncio.to_thread(plain_adapter, name, folder, self._model)
                await fleet.load_adapter(plain)
        except BaseException:
            await fleet.close()
            raise
        return fleet

    def _salt(self, version: int) -> str:
        """Prefixes are reused within one version of one run only."""
        return f"burnish-{self._nonce}-{version}"

    def _enter(self, request_id: str) -> None:
        if self._closed:
            raise self._closed_failure()
        if request_id in self._outstanding:
            raise UserError(
                f"request id {request_id!r} is already in flight.", fix="use unique ids."
            )
        if len(self._outstanding) >= self._config.max_outstanding:
            what = f"{len(self._outstanding)} requests are already in flight"
            raise RemoteFailure(RemoteProblem.OVERLOADED, self._config.urls[0], what)
        if not self._outstanding:
            self._busy_since_s = self._clock.now_s()
        self._outstanding.add(request_id)

    def _leave(self, request_id: str) -> None:
        self._outstanding.discard(request_id)
        if not self._outstanding:
            self._busy_s += self._clock.now_s() - self._busy_since_s

    async def _run(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        if self._closed:
            raise self._closed_failure()
        return await self._thread.run(work)

    def _closed_failure(self) -> RemoteFailure:
        return RemoteFailure(RemoteProblem.CLOSED, self._config.urls[0], "the engine is closed")

    async def _ended(self, task: "asyncio.Future[None]") -> None:
        """What became of work whose last word was heard."""
        try:
            await task
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if self._closed and current is not None and not current.cancelling():
                raise self._closed_failure() from None
            raise

    async def _deliver(self, state: Mapping[str, Any], version: int, inflight: InFlight) -> None:
        self._capabilities.require(EngineFeature.UPDATE_WEIGHTS, _INFLIGHT[inflight])
        if self._closed:
            raise self._closed_failure()
        await self._send(await self._write(state, version), version, inflight)

    async def _write(self, state: Mapping[str, Any], version: int) -> Published:
        dtype: Literal["bfloat16", "float32"] = "bfloat16"
        if any(fact.dtype == "float32" for fact in self._fleet.facts):
            dtype = "float32"
        folder = self._directory() / f"{self._nonce}-{version}"
        return await asyncio.to_thread(publish, self._model, state, folder, dtype)

    def _directory(self) -> Path:
        """Where the servers find what is given to them."""
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="burnish-weights-"))
            # The servers may run as somebody else.
            self._folder.chmod(0o755)
        return self._folder

    async def _send(self, published: Published, version: int, inflight: InFlight) -> None:
        delivery = Delivery(
            folder=published.folder.absolute(),
            digest=published.digest,
            tensor_digests=published.vector_digests,
            label=self._salt(version),
            inflight=inflight,
        )
        await self._run(lambda: self._fleet.update(delivery, version))
        self._served_digest = published.digest
        # A replica that was down is given the newest version: older ones have no reader.
        for old in self._published:
            if old != published.folder:
                await asyncio.to_thread(shutil.rmtree, old, ignore_errors=True)
        self._published = [published.folder]
