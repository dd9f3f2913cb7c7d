"""The boxes of a server, and whose they are."""

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import NamedTuple, cast

from burnish.core.boxes import Feature, Policy, Sandbox, SandboxPool, Snapshot, StatefulSandbox
from burnish.core.clock import Clock
from burnish.core.errors import ClassifiedFailure, UserError
from burnish.sandbox.cancellation import insist, uninterrupted
from burnish.sandbox.places import Places
from burnish.sandbox.pooling.fair_queue import QueueFull, Ticket
from burnish.sandbox.remote.kept_snapshots import KeptSnapshots
from burnish.sandbox.remote.messages import BoxInfo, CreateBox, ProblemKind
from burnish.sandbox.remote.problems import Refused

_LOG = logging.getLogger(__name__)
_ID_BYTES = 6
_DETACHED = ""
"""Owns what no session does."""
_Box = AbstractAsyncContextManager[Sandbox]
_Promise = Callable[[], _Box]


class Owner(NamedTuple):
    """Whose a box is."""

    session: str
    """It goes with this one."""
    user: str
    """Others do not see it; "" where users have no names."""

    @property
    def client(self) -> str:
        """Clients share the places evenly; more sessions of a user are no larger share."""
        return f"user {self.user}" if self.user else f"session {self.session}"


class Tenant:
    """A box that lives from one request to another.

    A pool gives boxes as contexts, and a context must end in the task in which it began: so each
    box has a task that does nothing but hold it.
    """

    def __init__(self, owner: Owner, request: CreateBox, ticket: Ticket, clock: Clock) -> None:
        """Not there yet; it takes one place of the ticket."""
        self.id = secrets.token_hex(_ID_BYTES)
        self.owner = owner
        self.ticket = ticket
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

    def __init__(self, pool: SandboxPool, clock: Clock, places: Places) -> None:
        """None yet; of no more than there are places."""
        self._pool = pool
        self._clock = clock
        self._places = places
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
        return tuple(t for t in self.all() if t.owner.session == session and not t.detached)

    def seen_by(self, user: str) -> tuple[Tenant, ...]:
        """Those of a user."""
        return tuple(tenant for tenant in self.all() if tenant.owner.user == user)

    def has(self, box_id: str, user: str) -> bool:
        """Whether there is a box of that name, and of this user."""
        return box_id in self._tenants and self._tenants[box_id].owner.user == user

    def get(self, box_id: str, user: str) -> Tenant:
        """A live box of a user.

        Raises:
            Refused: there is none of that name, as far as this user may know.
        """
        tenant = self._tenants[box_id] if self.has(box_id, user) else None
        if tenant is None:
            shown = box_id if box_id.isalnum() and len(box_id) <= 2 * _ID_BYTES else "of that name"
            raise Refused(
                ProblemKind.NO_BOX,
                f"there is no box {shown}: it was destroyed, or its lease ran out",
            )
        return tenant

    async def create(self, owner: Owner, request: CreateBox, count: int = 1) -> list[Tenant]:
        """Fresh boxes, when it is the client's turn: all of them, or none.

        Raises:
            ValueError: more than there are.
            Refused: too many wait already.
        """
        policy = request.policy or Policy()
        return await self._settle(
            owner, request, count, lambda: self._pool.acquire(request.image, policy)
        )

    async def fork(
        self, owner: Owner, parent: Tenant, count: int, snapshot_id: str | None
    ) -> list[Tenant]:
        """Boxes that start alike: all of them, or none. They are whose who asks for them.

        Raises:
            ValueError: more than there are.
            Refused: too many wait already.
        """
        box = self.stateful(parent)
        # One moment for all, though each is a context of its own that may end alone.
        snapshot = self.snapshot(parent, snapshot_id)
        if snapshot is None:
            snapshot = await box.snapshot()
            keeper = f"fork {secrets.token_hex(_ID_BYTES)}"
            self._snapshots.keep(snapshot, box, keeper, parent.owner.user)
            try:
                return await self._fork(owner, parent, box, count, snapshot)
            finally:
                await uninterrupted(asyncio.ensure_future(self._snapshots.release(keeper)))
        return await self._fork(owner, parent, box, count, snapshot)

    async def _fork(
        self, owner: Owner, parent: Tenant, box: StatefulSandbox, count: int, snapshot: Snapshot
    ) -> list[Tenant]:
        request = CreateBox(image=parent.image, policy=parent.policy, detached=parent.detached)
        return await self._settle(owner, request, count, lambda: _one_fork(box, snapshot))

    async def destroy(self, box_id: str) -> None:
        """End a box, if there is one; returns when it is gone."""
        tenant = self._tenants.get(box_id)
        if tenant is not None:
            # It stays in the list until it is gone, so that its place is not promised twice.
            await tenant.leave()
            if self._tenants.pop(box_id, None) is not None:
                self._places.give_back(tenant.ticket, 1)

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
        user = tenant.owner.user
        owner = f"{_DETACHED} {user}" if tenant.detached else tenant.owner.session
        self._snapshots.keep(snapshot, self.stateful(tenant), owner, user)

    async def forget(self, tenant: Tenant, snapshot_id: str) -> None:
        """Free it, whichever box of the user it was made of. Nothing if it is not there.

        Raises:
            UserError: this backend has no snapshots.
        """
        self.stateful(tenant)
        await self._snapshots.forget(snapshot_id, tenant.owner.user)

    def snapshot(self, tenant: Tenant, snapshot_id: str | None) -> Snapshot | None:
        """The one of that id; None for None.

        Raises:
            UserError: the user of the box made none here.
        """
        if snapshot_id is None:
            return None
        found = self._snapshots.find(snapshot_id, tenant.owner.user)
        if found is None:
            raise UserError(
                f"there is no snapshot {snapshot_id[:80]!r}.",
                fix="take the id that `snapshot` gave; a restarted server has none of the former",
            )
        return found

    async def _settle(
        self, owner: Owner, request: CreateBox, count: int, promise: _Promise
    ) -> list[Tenant]:
        # What the pool refuses it refuses before anybody waits.
        promise()
        self.num_waiting += 1
        try:
            ticket = await self._places.take(count, owner.client)
            wanted = [Tenant(owner, request, ticket, self._clock) for _ in range(count)]
            tasks = [asyncio.ensure_future(self._enter(one, promise())) for one in wanted]
            try:
                await asyncio.gather(*tasks)
            except BaseException:
                # Whoever cancels may do so again: by the end of the session, say.
                await uninterrupted(asyncio.ensure_future(self._give_up(wanted, tasks)))
                raise
            return wanted
        except QueueFull as error:
            raise Refused(ProblemKind.BUSY, error.failure.message) from error
        finally:
            self.num_waiting -= 1

    async def _enter(self, tenant: Tenant, context: _Box) -> None:
        await tenant.enter(context)
        self._tenants[tenant.id] = tenant
        self.num_created += 1

    async def _give_up(self, wanted: list[Tenant], tasks: list[asyncio.Task[None]]) -> None:
        """None of them stays; their places are free then."""
        for task in tasks:
            # Cancelled with us it may be in the midst of its tidying up already.
            if not task.cancelling():
                task.cancel()
        await insist(lambda: asyncio.wait(tasks))
        made = [
            tenant
            for tenant, task in zip(wanted, tasks, strict=True)
            if not task.cancelled() and task.exception() is None
        ]
        if len(made) < len(wanted):
            self._places.give_back(wanted[0].ticket, len(wanted) - len(made))
        await self.destroy_all(tuple(made))


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
