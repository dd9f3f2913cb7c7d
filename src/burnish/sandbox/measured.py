"""`SandboxPool` that counts what is done with the boxes of another one: the metrics of a run."""

import threading
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

from msgspec import field

from burnish.core.boxes import ExecResult, Policy, Sandbox, SandboxPool
from burnish.core.records import Record
from burnish.sandbox.forwarding import ForwardingBox, ForwardingPool


class BoxUse(Record, frozen=True, kw_only=True):
    """What happened in an interval."""

    waits_s: tuple[float, ...] = ()
    """How long each box was waited for."""
    commands: dict[str, int] = field(default_factory=dict)
    """Commands by `ExecStatus`."""
    exec_s: tuple[float, ...] = ()
    """How long each command took, as its caller saw it."""


class MeasuredPool(ForwardingPool):
    """Any pool; may be used from several event loops as far as that one may."""

    def __init__(self, pool: SandboxPool) -> None:
        """Wrap a pool, which is closed together with this one."""
        super().__init__(pool)
        self._lock = threading.Lock()
        self._waits_s: list[float] = []
        self._exec_s: list[float] = []
        self._commands: Counter[str] = Counter()

    def acquire(
        self, image: str | None = None, policy: Policy | None = None
    ) -> AbstractAsyncContextManager[Sandbox]:
        """See `SandboxPool.acquire`."""
        return self._acquire(self._pool.acquire(image, policy))

    def acquire_many(
        self, count: int, image: str | None = None, policy: Policy | None = None
    ) -> AbstractAsyncContextManager[tuple[Sandbox, ...]]:
        """See `SandboxPool.acquire_many`."""
        return self._acquire_many(self._pool.acquire_many(count, image, policy))

    @asynccontextmanager
    async def _acquire(
        self, context: AbstractAsyncContextManager[Sandbox]
    ) -> AsyncIterator[Sandbox]:
        start_s = time.monotonic()
        async with context as box:
            with self._lock:
                self._waits_s.append(time.monotonic() - start_s)
            yield MeasuredBox(box, self)

    @asynccontextmanager
    async def _acquire_many(
        self, context: AbstractAsyncContextManager[tuple[Sandbox, ...]]
    ) -> AsyncIterator[tuple[Sandbox, ...]]:
        start_s = time.monotonic()
        async with context as boxes:
            with self._lock:
                self._waits_s += [time.monotonic() - start_s] * len(boxes)
            yield tuple(MeasuredBox(box, self) for box in boxes)

    def executed(self, result: ExecResult, seconds: float) -> None:
        """A command ended."""
        with self._lock:
            self._commands[result.status.value] += 1
            self._exec_s.append(seconds)

    def take(self) -> BoxUse:
        """What happened since the last call."""
        with self._lock:
            use = BoxUse(
                waits_s=tuple(self._waits_s),
                commands=dict(self._commands),
                exec_s=tuple(self._exec_s),
            )
            self._waits_s.clear()
            self._exec_s.clear()
            self._commands.clear()
        return use


class MeasuredBox(ForwardingBox):
    """A box of any kind: all but `exec` goes straight through."""

    def __init__(self, box: Sandbox, pool: MeasuredPool) -> None:
        """Report to `pool`."""
        super().__init__(box)
        self._pool = pool

    async def exec(self, argv: tuple[str, ...], **options: Any) -> ExecResult:
        """See `Sandbox.exec`."""
        start_s = time.monotonic()
        result = await self._box.exec(argv, **options)
        self._pool.executed(result, time.monotonic() - start_s)
        return result

    def __getattr__(self, name: str) -> Any:
        """What a stateful box has beyond this."""
        return getattr(self._box, name)
