"""Several servers as one pool: boxes go where there is room, and around hosts that are down."""

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

from burnish.core.boxes import Capabilities, Isolation, Policy, Sandbox
from burnish.core.clock import Clock, SystemClock
from burnish.core.errors import ClassifiedFailure, UserError
from burnish.core.loop_thread import LoopThread
from burnish.sandbox.batches import Batches
from burnish.sandbox.limits import check_policy
from burnish.sandbox.remote.client import RemotePool
from burnish.sandbox.remote.messages import BoxInfo, ProblemKind
from burnish.sandbox.remote.problems import RemoteFailure

_LOG = logging.getLogger(__name__)

# A host that was down is tried again after this, then twice as long, and so on.
_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 60.0
# When all are full we queue at one; another one may have room by then.
_QUEUE_S = 2.0
# What others have at a host is asked at most so often while there seems to be room.
_LOOK_S = 1.0
_WEAKEST_FIRST = (Isolation.NONE, Isolation.NAMESPACES, Isolation.USER_KERNEL)


class _Host:
    """One server and what we know of it."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.pool: RemotePool | None = None
        self.num_ours = 0
        """Boxes that we have there, or are about to."""
        self.num_others = 0
        """Boxes that others had there, when we last asked."""
        self.looked_s = float("-inf")
        self.num_failures = 0
        self.retry_s = 0.0
        """Not before."""
        self.problem = ""
        self.connecting: Future[None] | None = None

    def free(self) -> float:
        """Share of its boxes that are free; below 0 if we queue there."""
        most = self.pool.max_boxes if self.pool is not None else 1
        return 1 - (self.num_ours + self.num_others) / max(1, most)


class FleetPool:
    """Boxes of several hosts. A host may be down at any time, also at the start.

    A box stays on its host: what was lost with a host is an `INFRA_ERROR` there, and is not run
    again elsewhere. Only `acquire` goes to another host.
    """

    def __init__(
        self,
        urls: Sequence[str],
        token: str | None = None,
        *,
        ca_file: Path | None = None,
        acquire_timeout_s: float | None = None,
        clock: Clock | None = None,
    ) -> None:
        """Connect to all; those that are down are tried again later.

        Args:
            urls: see `RemotePool`.
            token: the same for all.
            ca_file: see `RemotePool`.
            acquire_timeout_s: how long `acquire` waits for a box; None: as long as it takes.
            clock: when hosts are tried again.

        Raises:
            UserError: a URL or the token is wrong, or there are no URLs.
            ClassifiedFailure: of kind `sandbox`: none of the hosts can be reached.
        """
        if not urls or len(set(urls)) != len(urls):
            raise UserError("a fleet is a list of different URLs.", fix="give each host once")
        self._token = token
        self._ca_file = ca_file
        self._timeout_s = acquire_timeout_s
        self._clock = clock or SystemClock()
        self._thread = LoopThread()
        self._lock = threading.Lock()
        self._closed = False
        self._batches = Batches()
        self._hosts = [_Host(url) for url in urls]
        self._declared: Capabilities | None = None
        self._connectors = ThreadPoolExecutor(len(urls), "sandbox-fleet")
        try:
            list(self._connectors.map(self._connect, self._hosts))
            found = [host.pool.capabilities for host in self._hosts if host.pool is not None]
            if not found:
                raise self._all_down()
        except BaseException:
            for host in self._hosts:
                if host.pool is not None:
                    self._thread.run_blocking(host.pool.close)
            self._connectors.shutdown()
            self._thread.close()
            raise
        self._declared = _common(found)

    @property
    def capabilities(self) -> Capabilities:
        """What all hosts can do that were up at the start."""
        assert self._declared is not None
        return self._declared

    def acquire(
        self, image: str | None = None, policy: Policy | None = None
    ) -> AbstractAsyncContextManager[Sandbox]:
        """A fresh box on the host with the most room. Waits while all are full.

        Raises:
            UserError: the policy cannot be enforced, or the image does not exist, on some host.
            ClassifiedFailure: of kind `sandbox`: all hosts are down, or no box came in time.
        """
        policy = policy or Policy()
        check_policy(image, policy, self.capabilities)
        return self._acquired(image, policy)

    def acquire_many(
        self, count: int, image: str | None = None, policy: Policy | None = None
    ) -> AbstractAsyncContextManager[tuple[Sandbox, ...]]:
        """See `SandboxPool.acquire_many`. They may be on several hosts."""
        most = sum(host.pool.max_boxes for host in self._hosts if host.pool is not None)
        if len(self._hosts) == 1 and 1 <= count <= most:
            policy = policy or Policy()
            check_policy(image, policy, self.capabilities)
            return self._whole(count, image, policy)
        return self._batches.take(count, most, lambda: self.acquire(image, policy))

    async def close(self) -> None:
        """Destroy the boxes on all hosts; may be called twice."""
        if self._closed:
            return
        self._closed = True
        await asyncio.to_thread(self._connectors.shutdown, cancel_futures=True)
        pools = [host.pool for host in self._hosts if host.pool is not None]
        await asyncio.gather(*(pool.close() for pool in pools))
        await asyncio.to_thread(self._thread.close)

    @asynccontextmanager
    async def _acquired(self, image: str | None, policy: Policy) -> AsyncIterator[Sandbox]:
        host, pool, info = await self._create(image, policy)
        try:
            yield pool.attach(info.id)
        finally:
            try:
                await pool.release(info.id)
            finally:
                self._count(host, -1)

    @asynccontextmanager
    async def _whole(
        self, count: int, image: str | None, policy: Policy
    ) -> AsyncIterator[tuple[Sandbox, ...]]:
        """A batch of the only host: one request, see `RemotePool.create_many`."""
        host = await self._choose()
        pool = host.pool
        assert pool is not None
        self._count(host, count)
        try:
            try:
                made = await pool.create_many(count, image, policy, wait_s=self._timeout_s)
            except RemoteFailure as error:
                if error.kind is not ProblemKind.BUSY:
                    self._failed(host, error)
                raise
            try:
                yield tuple(pool.attach(info.id) for info in made)
            finally:
                await pool.release_all(made)
        finally:
            self._count(host, -count)

    async def _create(self, image: str | None, policy: Policy) -> tuple[_Host, RemotePool, BoxInfo]:
        give_up_s = None if self._timeout_s is None else time.monotonic() + self._timeout_s
        while True:
            host = await self._choose()
            assert host.pool is not None
            pool = host.pool
            self._count(host, 1)
            try:
                info = await pool.create(image, policy, wait_s=self._queue_s(give_up_s))
            except ClassifiedFailure as error:
                self._count(host, -1)
                busy = isinstance(error, RemoteFailure) and error.kind is ProblemKind.BUSY
                host.looked_s = float("-inf")
                if not busy:
                    self._failed(host, error)
                elif give_up_s is not None and time.monotonic() >= give_up_s:
                    what = f"all hosts are full: no box was free in {self._timeout_s:g} s"
                    raise self._failure(what) from error
            except BaseException:
                self._count(host, -1)
                raise
            else:
                host.num_failures = 0
                return host, pool, info

    def _queue_s(self, give_up_s: float | None) -> float | None:
        if len(self._hosts) == 1 and give_up_s is None:
            return None
        left = _QUEUE_S if give_up_s is None else max(0.0, give_up_s - time.monotonic())
        return min(_QUEUE_S, left)

    async def _choose(self) -> _Host:
        """The host that has the most room among those that are up."""
        if self._closed:
            raise self._failure("the pool is closed")
        connecting = self._connect_due()
        if connecting and not any(host.pool for host in self._hosts):
            await asyncio.wait([asyncio.wrap_future(future) for future in connecting])
        now = self._clock.now_s()
        up = [host for host in self._hosts if host.pool is not None and now >= host.retry_s]
        await asyncio.gather(*(self._look(host) for host in up if self._is_stale(host)))
        up = [host for host in up if now >= host.retry_s]
        if not up:
            raise self._all_down()
        return max(up, key=_Host.free)

    def _connect_due(self) -> list[Future[None]]:
        """Try hosts again whose time has come. They hold nobody up who can go elsewhere."""
        with self._lock:
            for host in self._hosts:
                done = host.connecting is None or host.connecting.done()
                if host.pool is None and done and self._clock.now_s() >= host.retry_s:
                    host.connecting = self._connectors.submit(self._connect, host)
            return [
                host.connecting
                for host in self._hosts
                if host.connecting is not None and not host.connecting.done()
            ]

    def _is_stale(self, host: _Host) -> bool:
        return host.free() <= 0 or self._clock.now_s() - host.looked_s >= _LOOK_S

    async def _look(self, host: _Host) -> None:
        """Ask a host what others have there by now."""
        assert host.pool is not None
        host.looked_s = self._clock.now_s()
        try:
            stats = await host.pool.stats()
        except RemoteFailure as error:
            self._failed(host, error)
            return
        host.num_others = max(0, stats.num_boxes + stats.num_waiting - host.num_ours)

    def _connect(self, host: _Host) -> None:
        """Blocks. A host that is down stays without a pool; one that does not fit is left out."""
        try:
            pool = RemotePool(host.url, self._token, ca_file=self._ca_file, thread=self._thread)
        except (ClassifiedFailure, UserError) as error:
            if self._declared is None and isinstance(error, UserError):
                raise
            self._failed(host, error)
            return
        declared = self._declared
        if declared is not None and not _covers(pool.capabilities, declared):
            self._thread.run_blocking(pool.close)
            self._failed(host, self._failure(f"{host.url} can do less than the others"))
            return
        host.num_failures, host.retry_s = 0, 0.0
        host.pool = pool

    def _failed(self, host: _Host, error: ClassifiedFailure | UserError) -> None:
        pause_s = min(_FIRST_PAUSE_S * 2**host.num_failures, _LONGEST_PAUSE_S)
        host.num_failures += 1
        host.retry_s = self._clock.now_s() + pause_s
        host.problem = str(error) if isinstance(error, UserError) else error.failure.message
        _LOG.warning("left out for %g s: %s", pause_s, host.problem)

    def _count(self, host: _Host, change: int) -> None:
        with self._lock:
            host.num_ours += change

    def _all_down(self) -> RemoteFailure:
        problems = "; ".join(host.problem for host in self._hosts)
        return self._failure(f"no host gives boxes: {problems}")

    def _failure(self, message: str) -> RemoteFailure:
        return RemoteFailure(ProblemKind.UNREACHABLE, f"fleet of {len(self._hosts)}", message)


def _common(found: list[Capabilities]) -> Capabilities:
    """What a caller may rely on wherever its box comes to be."""
    return Capabilities(
        backend="fleet of " + ", ".join(sorted({c.backend for c in found})),
        enforces=frozenset.intersection(*(c.enforces for c in found)),
        isolation=min((c.isolation for c in found), key=_WEAKEST_FIRST.index),
        features=frozenset.intersection(*(c.features for c in found)),
        seccomp=all(c.seccomp for c in found),
        notes=tuple(dict.fromkeys(note for c in found for note in c.notes)),
    )


def _covers(found: Capabilities, declared: Capabilities) -> bool:
    return (
        found.enforces >= declared.enforces
        and found.features >= declared.features
        and _WEAKEST_FIRST.index(found.isolation) >= _WEAKEST_FIRST.index(declared.isolation)
        and found.seccomp >= declared.seccomp
    )
