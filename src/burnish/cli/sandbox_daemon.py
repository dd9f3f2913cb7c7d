"""How the verbs of `burnish sandbox` reach their boxes: in the daemon of this user."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

from burnish.core.errors import UserError

if TYPE_CHECKING:
    from burnish.sandbox.remote.box import RemoteStatefulBox
    from burnish.sandbox.remote.client import RemotePool
    from burnish.sandbox.remote.problems import RemoteFailure

T = TypeVar("T")

# A daemon that ended for idleness between our look and our question is started once more.
_TRIES = 2
_ACQUIRE_S = 20.0


def with_new_box(use: "Callable[[RemotePool], Awaitable[T]]") -> T:
    """Run on the daemon, which is started if there is none."""
    from burnish.sandbox.remote.daemon import ensure_running
    from burnish.sandbox.remote.messages import ProblemKind
    from burnish.sandbox.remote.problems import RemoteFailure

    for left in reversed(range(_TRIES)):
        try:
            return asyncio.run(_use(ensure_running(), use))
        except RemoteFailure as error:
            if error.kind is ProblemKind.BUSY:
                raise _busy(error) from error
            if not left:
                raise
    raise AssertionError("the last try returns or raises")


def with_box(box_id: str, use: "Callable[[RemoteStatefulBox], Awaitable[T]]") -> T:
    """Run on a box that the daemon has.

    Raises:
        UserError: it has none of that id.
    """
    from burnish.sandbox.remote.box import RemoteStatefulBox

    async def on_pool(pool: "RemotePool") -> T:
        return await use(RemoteStatefulBox(pool, box_id))

    return with_boxes_of(box_id, on_pool)


def with_boxes_of(box_id: str, use: "Callable[[RemotePool], Awaitable[T]]") -> T:
    """Run on the daemon of a box that may not exist.

    Raises:
        UserError: it does not, or its daemon was killed.
    """
    from burnish.sandbox.remote.daemon import has_died, log_file, running_url
    from burnish.sandbox.remote.messages import ProblemKind
    from burnish.sandbox.remote.problems import RemoteFailure

    url = running_url()
    if url is None and has_died():
        raise UserError(
            f"box {box_id[:80]!r} is gone: the daemon of sandboxes was killed, and all its boxes "
            f"with it; {log_file()} has its last words.",
            fix="burnish sandbox create",
        )
    try:
        if url is not None:
            return asyncio.run(_use(url, use))
    except RemoteFailure as error:
        if error.kind is ProblemKind.BUSY:
            raise _busy(error) from error
        if error.kind is not ProblemKind.NO_BOX:
            raise
    raise UserError(f"there is no box {box_id[:80]!r}.", fix="burnish sandbox list")


def _busy(error: "RemoteFailure") -> UserError:
    what = f"no box is free: {error.failure.message}."
    return UserError(what, fix="burnish sandbox list, then burnish sandbox destroy ID")


def if_running(use: "Callable[[RemotePool], Awaitable[T]]") -> T | None:
    """Run on the daemon; None if there is none."""
    from burnish.sandbox.remote.daemon import running_url

    url = running_url()
    return None if url is None else asyncio.run(_use(url, use))


async def _use(url: str, use: "Callable[[RemotePool], Awaitable[T]]") -> T:
    from burnish.sandbox.remote.client import RemotePool

    pool = await asyncio.to_thread(lambda: RemotePool(url, acquire_timeout_s=_ACQUIRE_S))
    try:
        return await use(pool)
    finally:
        await pool.close()
