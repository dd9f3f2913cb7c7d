"""Pools and boxes around other ones: what a wrapper does not change goes straight through."""

from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, TypeVar, cast

import msgspec

from burnish.core.boxes import (
    Capabilities,
    ExecResult,
    Feature,
    Limits,
    NetworkedSandbox,
    Policy,
    Sandbox,
    SandboxPool,
    Snapshot,
    StatefulSandbox,
)

T = TypeVar("T")


class ForwardingBox:
    """A `Sandbox` by another one.

    A wrapper that treats all operations alike overrides `_pass`; others override the operation.
    Nothing reaches the box inside but what stands here: a wrapper is often there for control.
    """

    def __init__(self, box: Sandbox) -> None:
        """Wrap a box."""
        self._box = box

    async def _pass(self, call: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Carry out one operation of the box inside."""
        return await call()

    @property
    def id(self) -> str:
        """Of the box inside."""
        return self._box.id

    async def write_file(self, path: str, data: bytes) -> None:
        """See `Sandbox.write_file`."""
        await self._pass(lambda: self._box.write_file(path, data))

    async def read_file(self, path: str, limit_bytes: int = 1 << 20) -> bytes:
        """See `Sandbox.read_file`."""
        return await self._pass(lambda: self._box.read_file(path, limit_bytes))

    async def exec(
        self,
        argv: tuple[str, ...],
        *,
        stdin: bytes = b"",
        limits: Limits | None = None,
        env: dict[str, str] | None = None,
        cwd: str | None = None,
        keep: bool = False,
    ) -> ExecResult:
        """See `Sandbox.exec`."""
        return await self._pass(
            lambda: self._box.exec(argv, stdin=stdin, limits=limits, env=env, cwd=cwd, keep=keep)
        )

    async def set_allow(self, allow: tuple[str, ...]) -> None:
        """See `NetworkedSandbox.set_allow`; for boxes that are."""
        box = cast(NetworkedSandbox, self._box)
        await self._pass(lambda: box.set_allow(allow))


class ForwardingStatefulBox(ForwardingBox):
    """A `StatefulSandbox` by another one."""

    def __init__(self, box: StatefulSandbox) -> None:
        """Wrap a box."""
        super().__init__(box)
        self._stateful = box

    async def snapshot(self) -> Snapshot:
        """See `StatefulSandbox.snapshot`."""
        return await self._pass(self._stateful.snapshot)

    async def rollback(self, snapshot: Snapshot) -> None:
        """See `StatefulSandbox.rollback`."""
        await self._pass(lambda: self._stateful.rollback(snapshot))

    async def forget(self, snapshot: Snapshot) -> None:
        """See `StatefulSandbox.forget`."""
        await self._pass(lambda: self._stateful.forget(snapshot))

    def fork(
        self, count: int, snapshot: Snapshot | None = None
    ) -> AbstractAsyncContextManager[tuple[StatefulSandbox, ...]]:
        """See `StatefulSandbox.fork`; the forks are not wrapped."""
        return self._stateful.fork(count, snapshot)

    async def export_tar(self, destination: Path, snapshot: Snapshot | None = None) -> str:
        """See `StatefulSandbox.export_tar`."""
        return await self._pass(lambda: self._stateful.export_tar(destination, snapshot))

    async def import_tar(self, source: Path) -> None:
        """See `StatefulSandbox.import_tar`."""
        await self._pass(lambda: self._stateful.import_tar(source))


class ForwardingPool:
    """A `SandboxPool` by another one. Who overrides `acquire` overrides `acquire_many` too."""

    def __init__(self, pool: SandboxPool) -> None:
        """Wrap a pool, which is closed together with this one."""
        self._pool = pool

    @property
    def inner(self) -> SandboxPool:
        """The pool inside."""
        return self._pool

    @property
    def capabilities(self) -> Capabilities:
        """Of the pool inside, but for boxes that are had by another call than those below."""
        found = self._pool.capabilities
        return msgspec.structs.replace(found, features=found.features - {Feature.WARM_PYTHON})

    def acquire(
        self, image: str | None = None, policy: Policy | None = None
    ) -> AbstractAsyncContextManager[Sandbox]:
        """See `SandboxPool.acquire`."""
        return self._pool.acquire(image, policy)

    def acquire_many(
        self, count: int, image: str | None = None, policy: Policy | None = None
    ) -> AbstractAsyncContextManager[tuple[Sandbox, ...]]:
        """See `SandboxPool.acquire_many`."""
        return self._pool.acquire_many(count, image, policy)

    async def close(self) -> None:
        """Close the pool inside."""
        await self._pool.close()


def innermost(pool: SandboxPool) -> SandboxPool:
    """The pool that makes the boxes."""
    while isinstance(pool, ForwardingPool):
        pool = pool.inner
    return pool
