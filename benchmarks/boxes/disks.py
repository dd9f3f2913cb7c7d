"""Boxes that write to a disk beside boxes that write to memory."""

import asyncio
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

from burnish.core.boxes import ExecStatus, Limits
from burnish.sandbox.native.pool import NativePool

_WRITE_BYTES = 256 * 2**20
_WRITE = f"dd if=/dev/zero of=f bs=1M count={_WRITE_BYTES >> 20} conv=fsync 2>/dev/null"


class Measured(NamedTuple):
    """Medians of one kind of box."""

    cycle_ms: float
    """From nothing to a box, a command, and the end of it."""
    write_ms: float
    """256 MiB, flushed."""
    host_bytes: float
    """Memory that the host lacks when a job has written 2 GB."""


async def measure(
    pool: NativePool, used_bytes: Callable[[], int], n: int, big_bytes: int
) -> Measured:
    """Use a pool without warm boxes.

    Args:
        pool: whose boxes.
        used_bytes: memory in use on the host now.
        n: how many cycles; a third as many writes.
        big_bytes: what the job writes that should not need memory.
    """
    cycles, writes = [], []
    for _ in range(n):
        start = time.perf_counter()
        async with pool.acquire() as box:
            assert (await box.exec(("/bin/true",))).status is ExecStatus.OK
        cycles.append((time.perf_counter() - start) * 1e3)
        # What is unmounted behind the last round would slow down this one.
        await asyncio.sleep(0.05)
    limits = Limits(
        wall_s=300, cpu_s=300, disk_bytes=big_bytes + 2**28, memory_bytes=big_bytes + 2**29
    )
    async with pool.acquire() as box:
        await box.exec(("/bin/true",), limits=limits)
        for _ in range(max(1, n // 3)):
            start = time.perf_counter()
            assert (await box.exec(("sh", "-c", _WRITE), limits=limits)).status is ExecStatus.OK
            writes.append((time.perf_counter() - start) * 1e3)
    async with pool.acquire() as box:
        await box.exec(("/bin/true",), limits=limits)
        before = used_bytes()
        command = ("sh", "-c", f"head -c {big_bytes} /dev/zero > f")
        assert (await box.exec(command, limits=limits)).status is ExecStatus.OK
        taken = used_bytes() - before
    return Measured(statistics.median(cycles), statistics.median(writes), max(0, taken))
