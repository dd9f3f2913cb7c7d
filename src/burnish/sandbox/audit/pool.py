"""`SandboxPool` that keeps a log of every box of another one."""

import os
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager
from pathlib import Path
from typing import cast

import msgspec

from burnish.core.boxes import (
    Capabilities,
    Feature,
    Policy,
    Sandbox,
    SandboxPool,
    StatefulSandbox,
)
from burnish.sandbox.audit import events
from burnish.sandbox.audit.box import AuditedBox, AuditedStatefulBox
from burnish.sandbox.audit.logs import AuditLogs
from burnish.sandbox.forwarding import ForwardingPool


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
        found = super().capabilities
        return msgspec.structs.replace(found, features=found.features - {Feature.PROCESSES})

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
        """A box with a log, which is closed with `ends`: after the box."""
        log = self._logs.begin(box, created, events.GENESIS)
        ends.enter_context(self._logs.ending(log))
        if Feature.SNAPSHOTS in self.capabilities.features:
            stateful = cast(StatefulSandbox, box)
            return AuditedStatefulBox(stateful, log, self._logs, created)
        return AuditedBox(box, log)

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
