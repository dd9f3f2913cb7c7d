"""Runs foreign code so that it can be given up on.

A deadline inside one event loop cannot stop code that never awaits. So a probe runs in a thread
with a loop of its own; when it is late, an exception is raised inside the thread and the thread is
left behind. Boxes stay with the loop that owns them: the bridge sends each call there.
"""

from __future__ import annotations

import asyncio
import ctypes
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, TypeVar

from burnish.core.boxes import (
    Capabilities,
    Isolation,
    Policy,
    Sandbox,
    SandboxPool,
)
from burnish.core.errors import ClassifiedFailure
from burnish.core.records import Failure
from burnish.core.vocabulary import FailureKind
from burnish.sandbox.forwarding import ForwardingBox, ForwardingPool

T = TypeVar("T")


async def run_isolated(work: Callable[[], Coroutine[Any, Any, T]], timeout_s: float) -> T:
    """Await `work()` in another thread.

    Raises:
        TimeoutError: if it is not done in time; whatever `work` raised otherwise.
    """
    done: Future[T] = Future()

    def body() -> None:
        try:
            result = asyncio.run(work())
        except Exception as error:  # noqa: BLE001 (carried to the caller, which classifies it)
            _settle(done, error)
        except BaseException as error:  # noqa: BLE001 (sys.exit() in an environment must not pass)
            _settle(done, RuntimeError(f"raised {type(error).__name__}"))
        else:
            if done.set_running_or_notify_cancel():
                done.set_result(result)

    thread = threading.Thread(target=body, name="burnish-audit", daemon=True)
    thread.start()
    try:
        return await asyncio.wait_for(asyncio.wrap_future(done), timeout_s)
    except TimeoutError:
        if thread.is_alive() and thread.ident is not None:
            # Ends pure Python loops, which would burn a core for the rest of the run.
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit)
            )
        raise


def _settle(done: Future[T], error: Exception) -> None:
    if done.set_running_or_notify_cancel():
        done.set_exception(error)


class MissingPool:
    """Stands in where there is no sandbox: says so when a box is asked for."""

    @property
    def capabilities(self) -> Capabilities:
        """Nothing."""
        return Capabilities(
            backend="none", enforces=frozenset(), isolation=Isolation.NONE, seccomp=False
        )

    def acquire(
        self, image: str | None = None, policy: Policy | None = None
    ) -> AbstractAsyncContextManager[Sandbox]:
        """Refuse."""
        raise _no_sandbox()

    def acquire_many(
        self, count: int, image: str | None = None, policy: Policy | None = None
    ) -> AbstractAsyncContextManager[tuple[Sandbox, ...]]:
        """Refuse."""
        raise _no_sandbox()

    async def close(self) -> None:
        """Nothing to close."""


def _no_sandbox() -> ClassifiedFailure:
    return ClassifiedFailure(
        Failure(
            kind=FailureKind.SANDBOX,
            where="quality.sandbox",
            message="needs a sandbox and there is none; run `burnish doctor` for the fix",
        )
    )


class BridgedPool(ForwardingPool):
    """A pool of another event loop, usable from this one."""

    def __init__(self, pool: SandboxPool, owner: asyncio.AbstractEventLoop) -> None:
        """Send all calls to `pool` on the loop `owner`."""
        super().__init__(pool)
        self._owner = owner

    @asynccontextmanager
    async def acquire(
        self, image: str | None = None, policy: Policy | None = None
    ) -> AsyncIterator[Sandbox]:
        """A box that lives on the owner's loop."""
        context = self._pool.acquire(image, policy)
        box = await self._there(context.__aenter__())
        try:
            yield BridgedBox(box, self._there)
        finally:
            await self._there(context.__aexit__(None, None, None))

    @asynccontextmanager
    async def acquire_many(
        self, count: int, image: str | None = None, policy: Policy | None = None
    ) -> AsyncIterator[tuple[Sandbox, ...]]:
        """Boxes that live on the owner's loop."""
        context = self._pool.acquire_many(count, image, policy)
        boxes = await self._there(context.__aenter__())
        try:
            yield tuple(BridgedBox(box, self._there) for box in boxes)
        finally:
            await self._there(context.__aexit__(None, None, None))

    async def close(self) -> None:
        """Nothing: the owner closes the pool."""

    async def _there(self, call: Coroutine[Any, Any, T]) -> T:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(call, self._owner))


class BridgedBox(ForwardingBox):
    """A box of another event loop."""

    def __init__(self, box: Sandbox, there: Callable[..., Awaitable[Any]]) -> None:
        """Run the calls of `box` through `there`."""
        super().__init__(box)
        self._there = there

    async def _pass(self, call: Callable[[], Coroutine[Any, Any, T]]) -> T:
        result: T = await self._there(call())
        return result
