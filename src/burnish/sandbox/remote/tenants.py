"""The boxes of a server, and whose they are."""

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import cast

from burnish.core.boxes import Feature, Policy, Sandbox, SandboxPool, Snapshot, StatefulSandbox
from burnish.core.clock import Clock
from burnish.core.errors import ClassifiedFailure, UserError
from burnish.sandbox.cancellation import uninterrupted
from burnish.sandbox.remote.kept_snapshots import KeptSnapshots
from burnish.sandbox.remote.messages import BoxInfo, CreateBox, ProblemKind
from burnish.sandbox.remote.problems import Refused

_LOG = logging.getLogger(__name__)
_ID_BYTES = 6
_DETACHED = ""
"""Owns what no session does."""


class Tenant:
    """A box that lives from one request to another.

    A pool gives boxes as contexts, and a context must end in the task in which it began: so each
    box has a task that does nothing but hold it.
    """

    def __init__(self, session: str, request: CreateBox, clock: Clock) -> None:
        """Not there yet."""
        self.id = secrets.token_hex(_ID_BYTES)
        self.session = session
        self.image = request.image
        self.policy = request.policy
        self.detached = request.detached
        self.num_commands = 0
        self._clock = clock
        self._made_s = clock.now_s()
        self._end = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._box: Sandbox | None = None

    @property
    def box(self) -> Sandbox:
        """The box itself."""
        assert self._box is not None
        return self._box

    async def enter(self, context: AbstractAsyncContextManager[Sandbox]) -> None:
        """Wait for a box; if cancelled, there is none."""
        ready = asyncio.Event()
        self._task = asyncio.create_task(self._hold(context, ready))
        waiting = asyncio.create_task(ready.wait())
        try:
            await asyncio.wait((self._task, waiting), return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            self._end.set()
            if not ready.is_set():
                self._task.cancel()
            await asyncio.wait((self._task,))
            raise
        finally:
            waiting.cancel()
        if not ready.is_set():
            await self._task
            raise Refused(ProblemKind.INTERNAL, "the pool gave no box")

    async def leave(self) -> None:
        """Destroy it; may be called twice."""
        self._end.set()
        if self._task is None:
            return
        await asyncio.wait((self._task,))
        if not self._task.cancelled() and (error := self._task.exception()):
            _LOG.error("box %s was not destroyed in order", self.id, exc_info=error)

    def info(self, *, busy: bool, lease_left_s: float) -> BoxInfo:
        """How it looks from outside."""
        return BoxInfo(
            id=self.id,
            local_id=self.box.id,
            image=self.image,
            policy=self.policy,
            detached=self.detached,
            age_s=self._clock.now_s() - self._made_s,
            num_commands=self.num_commands,
            busy=busy,
            lease_left_s=None if self.detached else lease_left_s,
        )

    async def _hold(
        self, context: AbstractAsyncContextManager[Sandbox], ready: asyncio.Event
    ) -> None:
        async with context as box:
            self._box = box
            self._made_s = self._clock.now_s()
            ready.set()
            await self._end.wait()


class Tenants:
    """All boxes of a pool that is served."""

    def __init__(self, pool: SandboxPool, clock: Clock, max_waiting: int) -> None:
        """None yet."""
        self._pool = pool
        self._clock = clock
        self._max_waiting = max_waiting
        self._tenants: dict[str, Tenant] = {}
        self._snapshots = KeptSnapshots()
        self.num_waiting = 0
        self.num_created = 0

    def __len__(self) -> int:
        """Boxes alive."""
        return len(self._tenants)

    def all(self) -> tuple[Tenant, ...]:
        """In the order of their making."""
        return tuple(self._tenants.values())

    def of(self, session: str) -> tuple[Tenant, ...]:
        """Those that go with their session."""
        return tuple(t for t in self.all() if t.session == session and not t.detached)

    def get(self, box_id: str) -> Tenant:
        """A live box.

        Raises:
            Refused: there is none of that name.
        """
        tenant = self._tenants.get(box_id)
        if tenant is None:
            shown = box_id if box_id.isalnum() and len(box_id) <= 2 * _ID_BYTES else "of that name"
            raise Refused(
                ProblemKind.NO_BOX,
                f"there is no box {shown}: it was destroyed, or its lease ran out",
            )
        return tenant

    async def create(self, session: str, request: CreateBox) -> Tenant:
        """A fresh box, when the pool has one.

        Raises:
            Refused: too many wait already.
        """
        if self.num_waiting >= self._max_waiting:
            raise Refused(ProblemKind.BUSY, f"{self.num_waiting} requests wait for a box already")
        policy = request.policy or Policy()
        return await self._settle(
            Tenant(session, request, self._clock), self._pool.acquire(request.image, policy)
        )

    async def fork(self, parent: Tenant, count: int, snapshot_id: str | None) -> list[Tenant]:
        """Boxes that start alike: all of them, or none.

        Raises:
            ValueError: `count` is no number of boxes.
        """
        if not 1 <= count <= self._max_waiting:
            raise ValueError(f"count is {count}: it must be between 1 and {self._max_waiting}")
        box = self.stateful(parent)
        # One moment for all, though each is a context of its own that may end alone.
        snapshot = self.snapshot(snapshot_id)
        if snapshot is None:
            snapshot = await box.snapshot()
            owner = f"fork {secrets.token_hex(_ID_BYTES)}"
            self._snapshots.keep(snapshot, box, owner)
            try:
                return await self._fork(parent, box, count, snapshot)
            finally:
                await uninterrupted(asyncio.ensure_future(self._snapshots.release(owner)))
        return await self._fork(parent, box, count, snapshot)

    async def _fork(
        self, parent: Tenant, box: StatefulSandbox, count: int, snapshot: Snapshot
    ) -> list[Tenant]:
        request = CreateBox(image=parent.image, policy=parent.policy, detached=parent.detached)
        made: list[Tenant] = []
        try:
            for _ in range(count):
                child = Tenant(parent.session, request, self._clock)
                made.append(await self._settle(child, _one_fork(box, snapshot)))
        except BaseException:
            # Whoever cancels may do so again: by the end of the session, say.
            await uninterrupted(asyncio.ensure_future(self.destroy_all(tuple(made))))
            raise
        return made

    async def destroy(self, box_id: str) -> None:
        """End a box, if there is one; returns when it is gone."""
        tenant = self._tenants.get(box_id)
        if tenant is not None:
            # It stays in the list until it is gone, so that its place is not promised twice.
            await tenant.leave()
            self._tenants.pop(box_id, None)

    async def end_session(self, session: str) -> None:
        """Its boxes go, and the snapshots that were made of them."""
        await self.destroy_all(self.of(session))
        await self._snapshots.release(session)

    async def destroy_all(self, tenants: tuple[Tenant, ...]) -> None:
        """End several at once."""
        if tenants:
            await asyncio.gather(*(self.destroy(tenant.id) for tenant in tenants))

    def stateful(self, tenant: Tenant) -> StatefulSandbox:
        """The box, if it has snapshots.

        Raises:
            UserError: this backend has none.
        """
        capabilities = self._pool.capabilities
        if Feature.SNAPSHOTS not in capabilities.features:
            raise UserError(
                f"the {capabilities.backend} sandbox has no snapshots here.",
                fix="choose another backend (`burnish doctor` lists them)",
            )
        return cast(StatefulSandbox, tenant.box)

    def remember(self, tenant: Tenant, snapshot: Snapshot) -> None:
        """Let clients name it by its id until it is forgotten, or its session ends.

        That of a detached box belongs to no session.
        """
        owner = _DETACHED if tenant.detached else tenant.session
        self._snapshots.keep(snapshot, self.stateful(tenant), owner)

    async def forget(self, tenant: Tenant, snapshot_id: str) -> None:
        """Free it, whoever made it. Nothing happens if it is not there.

        Raises:
            UserError: this backend has no snapshots.
        """
        self.stateful(tenant)
        await self._snapshots.forget(snapshot_id)

    def snapshot(self, snapshot_id: str | None) -> Snapshot | None:
        """The one of that id; None for None.

        Raises:
            UserError: none was made here.
        """
        if snapshot_id is None:
            return None
        found = self._snapshots.find(snapshot_id)
        if found is None:
            raise UserError(
                f"there is no snapshot {snapshot_id[:80]!r}.",
                fix="take the id that `snapshot` gave; a restarted server has none of the former",
            )
        return found

    async def _settle(
        self, tenant: Tenant, context: AbstractAsyncContextManager[Sandbox]
    ) -> Tenant:
        self.num_waiting += 1
        try:
            await tenant.enter(context)
        finally:
            self.num_waiting -= 1
        self._tenants[tenant.id] = tenant
        self.num_created += 1
        return tenant


@asynccontextmanager
async def _one_fork(box: StatefulSandbox, snapshot: Snapshot) -> AsyncIterator[Sandbox]:
    async with box.fork(1, snapshot) as (child,):
        yield child


async def close_pool(pool: SandboxPool) -> None:
    """The end of a server is no place to fail."""
    try:
        await pool.close()
    except ClassifiedFailure as error:
        _LOG.error("the pool was not closed in order: %s", error)
