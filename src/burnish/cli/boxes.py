"""The sandbox of a verb, or what stands in for it on a machine without one."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from burnish.core.boxes import SandboxPool
from burnish.core.errors import ClassifiedFailure, UserError


@asynccontextmanager
async def boxes_if_possible() -> AsyncIterator[tuple[SandboxPool | None, str]]:
    """The pool, or None and the reason: many environments need no box."""
    from burnish.sandbox.start import open_pool

    try:
        pool = open_pool()
    except (UserError, ClassifiedFailure) as error:
        yield None, str(error)
        return
    try:
        yield pool, ""
    finally:
        await pool.close()
