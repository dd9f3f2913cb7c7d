"""Hostile use of resources: what a box takes must not be missed by anybody else, nor outlive it."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from burnish.core.boxes import ExecResult, ExecStatus, Limits, SandboxPool
from burnish.sandbox.interpreter import python_argv

Attack = Callable[..., ExecResult]
Lines = Callable[[str], list[str]]
ENDED = set(ExecStatus) - {ExecStatus.INFRA_ERROR, ExecStatus.POLICY, ExecStatus.DISK}


def then_true(pool: SandboxPool, code: str, limits: Limits) -> tuple[ExecResult, ExecResult]:
    """An attack, and an honest command in the same box after it."""

    async def main() -> tuple[ExecResult, ExecResult]:
        async with pool.acquire() as box:
            attacked = await box.exec(python_argv("-c", code), limits=limits)
            return attacked, await box.exec(("echo", "well"))

    return asyncio.run(main())


ATTACKS = {
    "stops itself": "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)",
    "ignores every signal": """
import signal, time
for number in range(1, 65):
    try: signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError): pass
while True: time.sleep(1)
""",
    "forks in a new session": """
import os, time
for _ in range(20):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0: time.sleep(1000)
        os._exit(0)
time.sleep(1000)
""",
    "a generation each millisecond": """
import os, time
while True:
    try:
        if os.fork(): os._exit(0)
    except OSError: pass
""",
    "never reaps": """
import os, time
while True:
    try:
        if os.fork() == 0: os._exit(0)
    except OSError: time.sleep(0.01)
""",
    "spawns itself by vfork": """
import os, sys
while True:
    try: os.posix_spawn(sys.executable, sys.orig_argv, os.environ)
    except OSError: pass
""",
    "suspends its parents by vfork": """
import ctypes, time
for _ in range(50): ctypes.CDLL(None).vfork()
time.sleep(1000)
""",
    "spins in threads": """
import threading
def spin():
    while True: pass
for _ in range(8): threading.Thread(target=spin).start()
""",
    "opens everything": """
import os, time
while True:
    try: os.open("/dev/null", os.O_RDONLY)
    except OSError: time.sleep(1)
""",
    "fills pipes": """
import os, time
pipes = []
try:
    while True:
        pair = os.pipe(); os.set_blocking(pair[1], False); pipes.append(pair)
        try:
            while True: os.write(pair[1], b"x" * 65536)
        except BlockingIOError: pass
except OSError: time.sleep(1000)
""",
}


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_ends_in_time_and_the_box_still_works(pool: SandboxPool, name: str) -> None:
    attacked, after = then_true(pool, ATTACKS[name], Limits(wall_s=0.7, cpu_s=30))
    assert attacked.status in ENDED, attacked
    assert (after.status, after.stdout) == (ExecStatus.OK, b"well\n"), after


def test_one_process_has_so_many_files_and_no_more(lines: Lines) -> None:
    code = """
    opened = 0
    try:
        while True: os.open("/dev/null", os.O_RDONLY); opened += 1
    except OSError as error:
        print(errno.errorcode[error.errno], 200 < opened <= 256)
    """
    assert lines(code) == ["EMFILE True"]


def test_memory_cannot_be_pinned_beyond_the_limit(attack: Attack) -> None:
    code = """
    import mmap
    pages = mmap.mmap(-1, 1 << 30)
    address = ctypes.addressof(ctypes.c_char.from_buffer(pages))
    print(libc.mlock(ctypes.c_void_p(address), 1 << 30), libc.mlockall(3))
    """
    result = attack(code, memory_bytes=2**28)
    if result.status is ExecStatus.OK:
        assert result.stdout == b"-1 -1\n"
    else:
        assert result.status is ExecStatus.OOM


def test_anonymous_files_are_refused_or_count_as_memory(attack: Attack) -> None:
    code = """
    for _ in range(16):
        try:
            held = os.memfd_create("held")
        except PermissionError:
            sys.exit(3)
        for _ in range(4): os.write(held, bytes(1 << 23))
    print("512 MiB")
    """
    result = attack(code, memory_bytes=2**27)
    assert result.status is ExecStatus.OOM or result.exit_code == 3, result


def test_a_directory_deeper_than_any_path_can_be_removed_with_its_box(attack: Attack) -> None:
    code = """
    for _ in range(1500):
        os.mkdir("d" * 20); os.chdir("d" * 20)
    print("deep")
    """
    assert attack(code).stdout == b"deep\n"


def test_shared_memory_and_queues_are_the_boxs_own(pool: SandboxPool, prelude: str) -> None:
    made = f"""{prelude}
shm = libc.shmget(0x6275726e, 4096, 0o1666)
print("made", shm >= 0, flush=True)
import time; time.sleep(1)
"""
    seen = f"""{prelude}
print(libc.shmget(0x6275726e, 4096, 0o666), os.listdir("/dev/shm"))
"""

    async def main() -> tuple[ExecResult, ExecResult]:
        async with pool.acquire() as one, pool.acquire() as other:
            making = asyncio.create_task(one.exec(python_argv("-c", made)))
            await asyncio.sleep(0.3)
            found = await other.exec(python_argv("-c", seen))
            return await making, found

    making, found = asyncio.run(main())
    assert making.stdout.startswith(b"made")
    assert found.stdout == b"-1 []\n"
    listed = Path("/proc/sysvipc/shm")
    assert not listed.exists() or str(0x6275726E) not in listed.read_text()


def test_nothing_of_a_box_is_in_the_next_one(pool: SandboxPool) -> None:
    dirty = "touch /work/w /tmp/t /dev/shm/s; export LEFT=1; umask 0; ulimit -n 32; sleep 0"
    look = "ls -A /work /tmp /dev/shm; echo ${LEFT-none}; umask; ulimit -n; pwd; id -u"

    async def main() -> tuple[bytes, bytes]:
        async with pool.acquire() as box:
            fresh = (await box.exec(("sh", "-c", look))).stdout
            await box.exec(("sh", "-c", dirty))
        async with pool.acquire() as box:
            return fresh, (await box.exec(("sh", "-c", look))).stdout

    fresh, later = asyncio.run(main())
    assert fresh == later
    assert b"none" in fresh
