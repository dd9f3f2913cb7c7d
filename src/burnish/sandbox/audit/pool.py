"""`SandboxPool` that keeps a log of every box of another one."""

import os
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager
from pathlib import Path
from typing import Protocol, cast, runtime_checkable

import msgspec

from burnish.core.boxes import (
    Capabilities,
    Feature,
    Policy,
    Sandbox,
    SandboxPool,
    StatefulSandbox,
)
from burnish.core.errors import UserError
from burnish.sandbox.audit import events
from burnish.sandbox.audit.box import AuditedBox, AuditedStatefulBox
from burnish.sandbox.audit.log import BoxLog
from burnish.sandbox.audit.logs import AuditLogs
from burnish.sandbox.audit.warm_box import AuditedWarmBox
from burnish.sandbox.forwarding import ForwardingPool
from burnish.sandbox.native.python_jobs import WarmBox


@runtime_checkable
class PythonPool(Protocol):
    """A pool with `Feature.WARM_PYTHON`, such as `NativePool`."""

    def acquire_python(
        self,
        modules: tuple[str, ...] = (),
        image: str | None = None,
        policy: Policy | None = None,
        *,
        site: bool = False,
        paths: tuple[str, ...] = (),
    ) -> AbstractAsyncContextManager[WarmBox]:
        """See `NativePool.acquire_python`."""
        ...


class AuditedPool(ForwardingPool):
    """Any pool, with one log per box. For several event loops as far as the pool inside is.

    Where a proxy decides about the network of the boxes, make the `AuditLogs` first, and give the
    proxy `logs.network` as its sink.
    """

    def __init__(self, pool: SandboxPool, logs: AuditLogs | Path) -> None:
        """Wrap a pool, which is closed together with this one.

        Args:
            pool: where boxes come from.
            logs: where lines go; a directory means `AuditLogs(directory)`.

        Raises:
            UserError: the directory cannot be made or written.
        """
        super().__init__(pool)
        self._logs = AuditLogs(logs) if isinstance(logs, Path) else logs

    @property
    def capabilities(self) -> Capabilities:
        """Of the pool, as far as the log has events for it."""
        found = self._pool.capabilities
        missing = {Feature.PROCESSES}
        if not isinstance(self._pool, PythonPool):
            missing.add(Feature.WARM_PYTHON)
        return msgspec.structs.replace(found, features=found.features - missing)

    def acquire(
        self, image: str | None = None, policy: Policy | None = None
    ) -> AbstractAsyncContextManager[Sandbox]:
        """See `SandboxPool.acquire`.

        Raises:
            AuditFailure: the log cannot be written; there is no box then.
        """
        return self._acquire(image, policy or Policy())

    def acquire_many(
        self, count: int, image: str | None = None, policy: Policy | None = None
    ) -> AbstractAsyncContextManager[tuple[Sandbox, ...]]:
        """See `SandboxPool.acquire_many`.

        Raises:
            AuditFailure: the log of one cannot be written; there are no boxes then.
        """
        return self._acquire_many(count, image, policy or Policy())

    def acquire_python(
        self,
        modules: tuple[str, ...] = (),
        image: str | None = None,
        policy: Policy | None = None,
        *,
        site: bool = False,
        paths: tuple[str, ...] = (),
    ) -> AbstractAsyncContextManager[AuditedWarmBox]:
        """See `NativePool.acquire_python`; for pools with `Feature.WARM_PYTHON`.

        Raises:
            UserError: as there, or the pool inside has no such boxes.
            AuditFailure: the log cannot be written; there is no box then.
        """
        if not isinstance(self._pool, PythonPool):
            raise UserError(
                f"the {self.capabilities.backend} sandbox has no warm Python here.",
                fix="use acquire, or the native sandbox (`burnish doctor` lists backends)",
            )
        boxes = self._pool.acquire_python(modules, image, policy, site=site, paths=paths)
        return self._acquire_python(boxes, image, policy or Policy())

    @asynccontextmanager
    async def _acquire_python(
        self, boxes: AbstractAsyncContextManager[WarmBox], image: str | None, policy: Policy
    ) -> AsyncIterator[AuditedWarmBox]:
        with ExitStack() as ends:
            async with boxes as box:
                created = self._created(image, policy)
                log = self._begin(box, created, ends)
                yield AuditedWarmBox(box, log, self._logs, created)

    @asynccontextmanager
    async def _acquire(self, image: str | None, policy: Policy) -> AsyncIterator[Sandbox]:
        with ExitStack() as ends:
            async with self._pool.acquire(image, policy) as box:
                yield self._logged(box, self._created(image, policy), ends)

    @asynccontextmanager
    async def _acquire_many(
        self, count: int, image: str | None, policy: Policy
    ) -> AsyncIterator[tuple[Sandbox, ...]]:
        with ExitStack() as ends:
            async with self._pool.acquire_many(count, image, policy) as boxes:
                created = self._created(image, policy)
                yield tuple([self._logged(box, created, ends) for box in boxes])

    def _logged(self, box: Sandbox, created: events.Created, ends: ExitStack) -> Sandbox:
        log = self._begin(box, created, ends)
        if Feature.SNAPSHOTS in self.capabilities.features:
            stateful = cast(StatefulSandbox, box)
            return AuditedStatefulBox(stateful, log, self._logs, created)
        return AuditedBox(box, log)

    def _begin(self, box: Sandbox, created: events.Created, ends: ExitStack) -> BoxLog:
        """The log of a box, which is closed with `ends`: after the box."""
        log = self._logs.begin(box, created, events.GENESIS)
        ends.enter_context(self._logs.ending(log))
        return log

    def _created(self, image: str | None, policy: Policy) -> events.Created:
        capabilities = self.capabilities
        return events.Created(
            backend=capabilities.backend,
            isolation=capabilities.isolation,
            kernel=os.uname().release,
            image=image,
            image_digest=None if image is None else self._logs.image_digest(image),
            policy=policy,
            policy_digest=events.digest_of_record(policy),
        )
