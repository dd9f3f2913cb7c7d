"""The limits that a backend may have beyond the usual: each bites where it is said to be enforced.

Where a time is compared, a busy machine only makes it longer, and processor time shorter.
"""

import asyncio
import glob
import os
from typing import Any

import pytest

from burnish.core.boxes import ExecResult, ExecStatus, Feature, Limits, SandboxPool
from burnish.sandbox.interpreter import python_argv

MIB = 2**20


def run_python(pool: SandboxPool, code: str, **limits: Any) -> ExecResult:
    for name in limits:
        if name not in pool.capabilities.enforces and getattr(Limits(), name) is None:
            pytest.skip(f"the {pool.capabilities.backend} sandbox does not enforce {name} here")

    async def main() -> ExecResult:
        async with pool.acquire() as box:
            return await box.exec(python_argv("-c", code), limits=Limits(**limits))

    return asyncio.run(main())


@pytest.mark.parametrize("num_inodes", [100, 1000])
def test_files_are_counted(pool: SandboxPool, num_inodes: int) -> None:
    code = """
import errno
for made in range(100_000):
    try: open(f"/work/{made}", "x").close()
    except OSError as error: reason = error.errno; break
print(made, errno.errorcode[reason], flush=True); raise SystemExit(1)
"""
    result = run_python(pool, code, num_inodes=num_inodes)
    made, name = result.stdout.split()
    assert name == b"ENOSPC"
    assert num_inodes - 64 < int(made) <= num_inodes
    assert result.status is ExecStatus.DISK


def test_shared_memory_has_its_own_size(pool: SandboxPool) -> None:
    code = """
import os
written = 0
try:
    with open("/dev/shm/f", "wb", buffering=0) as file:
        while True: written += file.write(bytes(1 << 16))
except OSError as error: pass
with open("/work/f", "wb") as file: file.write(bytes(4 << 20))
print(written)
"""
    result = run_python(pool, code, shm_bytes=MIB, disk_bytes=8 * MIB)
    assert (result.status, result.stdout) == (ExecStatus.OK, str(MIB).encode() + b"\n"), result


def test_a_share_of_a_processor_is_all_there_is(pool: SandboxPool) -> None:
    code = """
import time
end = time.monotonic() + 1.5
while time.monotonic() < end: pass
"""
    result = run_python(pool, code, cpus=0.2)
    assert result.status is ExecStatus.OK, result
    # Not by the clocks of the box: a kernel in user space does not see that it waits. A quarter of
    # a second is for periods that begin before and end after, and for the start.
    assert result.usage.cpu_s is not None
    assert result.usage.cpu_s < 0.2 * result.usage.wall_s + 0.25


def test_open_files_are_limited_per_process(pool: SandboxPool) -> None:
    code = """
import os
held = 0
try:
    while True: os.open("/dev/null", os.O_RDONLY); held += 1
except OSError: print(held)
"""
    result = run_python(pool, code, num_files=50)
    assert 40 < int(result.stdout) <= 50


def test_swap_is_no_way_around_the_memory_limit(pool: SandboxPool) -> None:
    code = "held = bytearray(200 << 20)\nfor i in range(0, len(held), 4096): held[i] = 1\nprint(1)"
    result = run_python(pool, code, memory_bytes=64 * MIB, swap_bytes=0)
    assert result.status is ExecStatus.OOM, result


def test_reading_from_a_disk_is_slowed(pool: SandboxPool) -> None:
    files = [path for path in glob.glob("/usr/lib/*/*.so*") if os.path.getsize(path) > 3 * MIB]
    if not files:
        pytest.skip("no file of 3 MiB below /usr/lib to read")
    code = f"""
import mmap, os, time
buffer = mmap.mmap(-1, 1 << 18)
file = os.open({files[0]!r}, os.O_RDONLY | os.O_DIRECT)
start = time.monotonic()
done = 0
while done < 2 << 20: done += os.readv(file, [buffer])
print(time.monotonic() - start)
"""
    result = run_python(pool, code, read_bytes_per_s=2 * MIB)
    if b"Invalid argument" in result.stderr:
        pytest.skip("the file system of /usr has no direct reads")
    assert result.status is ExecStatus.OK, result
    assert float(result.stdout) > 0.5


def test_writes_to_memory_are_not_said_to_be_slowed(pool: SandboxPool) -> None:
    found = pool.capabilities
    if Feature.DISK_STORAGE not in found.features:
        assert "write_bytes_per_s" not in found.enforces


def test_no_box_is_told_the_peak_of_another(pool: SandboxPool) -> None:
    # It stays for some samples where memory is sampled.
    code = """
import time
held = bytearray(96 << 20)
for i in range(0, len(held), 4096): held[i] = 1
end = time.monotonic() + 0.2
while time.monotonic() < end: pass
"""
    assert (run_python(pool, code).usage.peak_memory_bytes or 96 * MIB) >= 96 * MIB

    async def small() -> int:
        async with pool.acquire() as box:
            return (await box.exec(("true",))).usage.peak_memory_bytes or 0

    # As many as may be ready, so that one of them is in whatever is used again.
    assert max(asyncio.run(small()) for _ in range(13)) < 64 * MIB
