"""`SandboxPool` on a server: boxes of another host, or of a process that outlives this one."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from burnish.core.boxes import (
    Capabilities,
    Feature,
    Policy,
    Sandbox,
)
from burnish.core.errors import ClassifiedFailure, UserError
from burnish.core.loop_thread import LoopThread
from burnish.core.records import Record
from burnish.sandbox.limits import check_policy
from burnish.sandbox.remote import messages as m
from burnish.sandbox.remote.box import RemoteBox, RemoteStatefulBox, box_path
from burnish.sandbox.remote.messages import ProblemKind
from burnish.sandbox.remote.problems import RemoteFailure
from burnish.sandbox.remote.wire import Wire

_LOG = logging.getLogger(__name__)
T = TypeVar("T")
R = TypeVar("R", bound=Record)

_BEATS_PER_LEASE = 4


class RemotePool:
    """Boxes of a server, used like local ones from any event loop.

    A thread of its own renews the lease of the boxes. If this process dies, or cannot reach the
    server for as long as the lease lasts, the boxes are destroyed there.
    """

    def __init__(
        self,
        url: str,
        token: str | None = None,
        *,
        ca_file: Path | None = None,
        acquire_timeout_s: float | None = None,
        thread: LoopThread | None = None,
    ) -> None:
        """Connect, and ask what the server can do.

        Args:
            url: as in `https://host:8321` or `http+unix:///run/burnish.sock`.
            token: what the server's `--token-file` holds.
            ca_file: PEM file of the authority of its certificate, if it is a private one.
            acquire_timeout_s: how long `acquire` waits for a box; None: as long as it takes.
            thread: shared with other pools; None: one of its own.

        Raises:
            UserError: the URL or the token is wrong, or the server is of another version.
            ClassifiedFailure: of kind `sandbox`, if the server cannot be reached.
        """
        self._wire = Wire(url, token, ca_file)
        self._timeout_s = acquire_timeout_s
        self._shared_thread = thread is not None
        self._thread = thread or LoopThread()
        self._beating: asyncio.Task[None] | None = None
        self._closed = False
        try:
            self._info = self._thread.run_blocking(lambda: self._wire.get("/v4/pool", m.PoolInfo))
        except BaseException:
            self._thread.run_blocking(self._wire.close)
            self._end_thread()
            raise

    @property
    def url(self) -> str:
        """Of the server."""
        return self._wire.url

    @property
    def max_boxes(self) -> int:
        """How many the server has."""
        return self._info.max_boxes

    @property
    def capabilities(self) -> Capabilities:
        """What boxes can do there, as far as the wire has words for it."""
        inner = self._info.capabilities
        features = inner.features - {Feature.PROCESSES, Feature.WARM_PYTHON}
        return msgspec.structs.replace(inner, backend=f"remote {inner.backend}", features=features)

    def acquire(
        self, image: str | None = None, policy: Policy | None = None
    ) -> AbstractAsyncContextManager[Sandbox]:
        """A fresh box, destroyed on exit. Waits while the server has none free.

        Raises:
            UserError: the policy cannot be enforced there, or the image does not exist there.
            ClassifiedFailure: of kind `sandbox`: not reachable, no box in time, or none starts.
        """
        policy = policy or Policy()
        check_policy(image, policy, self.capabilities)
        return self._acquired(image, policy)

    def acquire_many(
        self, count: int, image: str | None = None, policy: Policy | None = None
    ) -> AbstractAsyncContextManager[tuple[Sandbox, ...]]:
        """See `SandboxPool.acquire_many`."""
        policy = policy or Policy()
        check_policy(image, policy, self.capabilities)
        if not 1 <= count <= self.max_boxes:
            raise ValueError(f"asked for {count} boxes at once: 1 to {self.max_boxes} can be had")
        return self._many(count, image, policy)

    async def create(
        self,
        image: str | None = None,
        policy: Policy | None = None,
        *,
        detached: bool = False,
        wait_s: float | None = None,
    ) -> m.BoxInfo:
        """A box that the caller must `destroy`, or that goes with this pool unless `detached`.

        Args:
            image: see `acquire`.
            policy: see `acquire`.
            detached: it lives until it is destroyed. Only the daemon of a user allows that.
            wait_s: how long to wait for it; None: as the pool was told.
        """
        policy = policy or Policy()
        check_policy(image, policy, self.capabilities)
        request = m.CreateBox(image=image, policy=policy, detached=detached)
        return await self.claim("/v4/boxes", request, m.BoxInfo, wait_s)

    async def claim(
        self, path: str, request: Record, kind: type[R], wait_s: float | None = None
    ) -> R:
        """Ask for boxes; `wait_s` as in `create`. None in time: there are none.

        Raises:
            RemoteFailure: of kind BUSY: not enough were free in time.
        """
        limit_s = self._timeout_s if wait_s is None else wait_s

        async def work() -> R:
            self._beat()
            deadline_s = None if limit_s is None else time.monotonic() + limit_s
            return await self._wire.job(path, request, kind, deadline_s)

        try:
            return await self.run(work)
        except RemoteFailure as error:
            if error.kind is not ProblemKind.BUSY or limit_s is None:
                raise
            what = f"all {self.max_boxes} boxes are in use: not enough were free in {limit_s:g} s"
            raise RemoteFailure(ProblemKind.BUSY, self.url, what) from error

    def attach(self, box_id: str) -> RemoteBox:
        """A box that exists already; stays as it is when this pool is closed."""
        stateful = Feature.SNAPSHOTS in self._info.capabilities.features
        return RemoteStatefulBox(self, box_id) if stateful else RemoteBox(self, box_id)

    async def destroy(self, box_id: str, *, strict: bool = False) -> None:
        """End a box. One that is gone already is fine, unless `strict`."""
        path = box_path(box_id, self.url) + ("?strict" if strict else "")
        await self.run(lambda: self._wire.delete(path))

    async def boxes(self) -> tuple[m.BoxInfo, ...]:
        """All boxes of the server that are of the same user, also of other clients."""
        return (await self.run(lambda: self._wire.get("/v4/boxes", m.Boxes))).boxes

    async def stats(self) -> m.Stats:
        """How the server is doing."""
        return await self.run(lambda: self._wire.get("/v4/stats", m.Stats))

    async def close(self) -> None:
        """Destroy the boxes of this pool and hang up; may be called twice."""
        if self._closed:
            return
        self._closed = True
        try:
            await self._thread.run(self._hang_up)
        finally:
            await asyncio.to_thread(self._end_thread)

    async def run(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Await work on the wire in its own loop.

        Raises:
            ClassifiedFailure: this pool is closed.
        """
        if self._closed or self._thread.closed:
            raise self.failure("the pool is closed")
        try:
            return await self._thread.run(work)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._closed and task is not None and not task.cancelling():
                raise self.failure("the pool was closed") from None
            raise

    def failure(self, message: str) -> RemoteFailure:
        """A failure that names this host."""
        return RemoteFailure(ProblemKind.UNREACHABLE, self.url, message)

    @property
    def wire(self) -> Wire:
        """For boxes."""
        return self._wire

    @asynccontextmanager
    async def _acquired(self, image: str | None, policy: Policy) -> AsyncIterator[Sandbox]:
        info = await self.create(image, policy)
        try:
            yield self.attach(info.id)
        finally:
            await self.release(info.id)

    @asynccontextmanager
    async def _many(
        self, count: int, image: str | None, policy: Policy
    ) -> AsyncIterator[tuple[Sandbox, ...]]:
        made = await self.create_many(count, image, policy)
        try:
            yield tuple(self.attach(info.id) for info in made)
        finally:
            await self.release_all(made)

    async def create_many(
        self, count: int, image: str | None, policy: Policy, *, wait_s: float | None = None
    ) -> tuple[m.BoxInfo, ...]:
        """Like `create`, for so many boxes at once: all, or none.

        It is one request: two clients that each had a part of what they want would wait for ever.
        """
        request = m.CreateBoxes(count=count, box=m.CreateBox(image=image, policy=policy))
        return (await self.claim("/v4/batches", request, m.Boxes, wait_s)).boxes

    async def release_all(self, boxes: tuple[m.BoxInfo, ...]) -> None:
        """See `release`."""
        await asyncio.gather(*(self.release(info.id) for info in boxes))

    async def release(self, box_id: str) -> None:
        """End a box whose user leaves; goes on by itself if the caller is cancelled."""
        try:
            await asyncio.shield(self.destroy(box_id))
        except ClassifiedFailure as error:
            # Its lease ends it; to raise here would hide what the box was used for.
            _LOG.warning("box %s was not destroyed: %s", box_id, error)

    def _beat(self) -> None:
        if self._beating is None:
            self._beating = asyncio.get_running_loop().create_task(self._beat_for_ever())

    async def _beat_for_ever(self) -> None:
        while True:
            await asyncio.sleep(self._info.lease_s / _BEATS_PER_LEASE)
            try:
                stats = await self._wire.post("/v4/sessions/heartbeat", m.Done(), m.Stats)
                if stats.instance != self._info.instance:
                    _LOG.warning("%s was started anew: its former boxes are gone", self.url)
                    self._info = await self._wire.get("/v4/pool", m.PoolInfo)
            except (ClassifiedFailure, UserError) as error:
                _LOG.warning("the lease could not be renewed: %s", error)

    async def _hang_up(self) -> None:
        try:
            if self._beating is not None:
                self._beating.cancel()
                await self._wire.delete("/v4/sessions")
        except (ClassifiedFailure, UserError) as error:
            _LOG.warning("the boxes end with their lease: %s", error)
        finally:
            await self._wire.close()

    def _end_thread(self) -> None:
        if not self._shared_thread:
            self._thread.close()
