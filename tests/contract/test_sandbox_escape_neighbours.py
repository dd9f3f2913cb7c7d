"""Hostile neighbours: what one box could tell, take from or leave to another."""

import asyncio
import fcntl
from collections.abc import Callable

import pytest

from burnish.core.boxes import (
    ExecResult,
    ExecStatus,
    Feature,
    Isolation,
    Limits,
    SandboxPool,
)
from burnish.sandbox.interpreter import python_argv

Lines = Callable[[str], list[str]]

OFFER = """
import time
held = [socket.create_server(("127.0.0.1", 40404)), socket.socket(type=socket.SOCK_DGRAM)]
held[1].bind(("127.0.0.1", 40405))
for name in ("\\0burnish-neighbour", "/tmp/burnish-neighbour", "/work/burnish-neighbour"):
    held.append(socket.socket(socket.AF_UNIX)); held[-1].bind(name); held[-1].listen()
libc.semget(0x6275726e, 1, 0o1666); libc.shmget(0x6275726e, 4096, 0o1666)
for place in ("/dev/shm/left", "/tmp/left", "/work/left"): open(place, "w").write("left")
print("ready", flush=True); time.sleep(60)
"""
TEXT = """
def text(path):
    try:
        with open(path) as file: return file.read()
    except OSError: return ""  # gVisor has few of them
"""
SEEK = f"""{TEXT}
for port, kind in ((40404, socket.SOCK_STREAM), (40405, socket.SOCK_DGRAM)):
    s = socket.socket(socket.AF_INET, kind); s.settimeout(1)
    print(attempt(lambda: (s.connect(("127.0.0.1", port)), s.send(b"x"), s.recv(1))))
for name in ("\\0burnish-neighbour", "/tmp/burnish-neighbour", "/work/burnish-neighbour"):
    print(attempt(lambda: socket.socket(socket.AF_UNIX).connect(name)))
print(libc.semget(0x6275726e, 1, 0o666) < 0, libc.shmget(0x6275726e, 4096, 0o666) < 0)
print([os.path.exists(p) for p in ("/dev/shm/left", "/tmp/left", "/work/left")])
print(sum("neighbour" in line for line in text("/proc/net/unix").splitlines()))
print(len(text("/proc/sysvipc/sem").splitlines()))
print(attempt(lambda: os.kill(-1, 0)) in ("ESRCH", "EPERM", "None"))
print(len([n for n in os.listdir("/proc") if n.isdigit()]) <= 3)
print(sum(":9DD4" in line or ":9DD5" in line for kind in ("tcp", "udp")
          for line in text("/proc/net/" + kind).splitlines()))
"""


def test_nothing_that_a_box_offers_is_found_by_another(pool: SandboxPool, prelude: str) -> None:
    async def main() -> ExecResult:
        async with pool.acquire() as one, pool.acquire() as other:
            offering = asyncio.create_task(one.exec(python_argv("-c", prelude + OFFER)))
            # No file is read while a command runs: the other waits by itself.
            seeking = "import time; time.sleep(0.5)\n"
            found = await other.exec(python_argv("-c", prelude + seeking + SEEK))
            offering.cancel()
            with pytest.raises(asyncio.CancelledError):
                await offering
            return found

    found = asyncio.run(main())
    assert found.status is ExecStatus.OK, found
    seen = found.stdout.decode().splitlines()
    assert seen[0] == "ECONNREFUSED"
    assert seen[1] in ("ECONNREFUSED", "ETIMEDOUT")
    assert seen[2] == "ECONNREFUSED"
    assert set(seen[3:5]) == {"ENOENT"}
    assert seen[5:7] == ["True True", "[False, False, False]"]
    assert seen[7] == "0"
    assert seen[8] in ("0", "1")  # the heading
    assert seen[9:11] == ["True", "True"]


PROFILE = f"""{TEXT}
import resource, signal
print(sorted(os.listdir("/work")), sorted(os.listdir("/tmp")), sorted(os.listdir("/dev/shm")))
print(sorted(os.environ.items()), os.getcwd(), os.umask(0), os.getresuid(), os.getresgid())
print(os.getgroups(), os.uname()[1], os.nice(0), os.getpriority(0, 0), os.sched_getscheduler(0))
print(sorted(os.listdir("/proc/self/fd")))
print([resource.getrlimit(n) for n in range(16)])
print(signal.pthread_sigmask(signal.SIG_BLOCK, []))
print([signal.getsignal(n) == signal.SIG_IGN for n in range(1, 32)])
status = text("/proc/self/status")
print([line for line in status.splitlines()
       if line.startswith(("Sig", "Shd", "Cap", "NoNew", "Seccomp", "Umask", "Uid", "Groups"))
       and not line.startswith("SigQ")])
print(text("/proc/self/oom_score_adj").strip(), os.sched_getaffinity(0))
print([os.stat(p).st_mode for p in ("/", "/work", "/tmp", "/dev/shm", "/dev/null")])
print([line.split()[:4] for line in text("/proc/net/tcp").splitlines()][1:])
print(text("/proc/sysvipc/sem"))
print(libc.personality(0xffffffff), os.getpgid(0) == os.getpid(), os.getsid(0) == os.getpid())
"""
DIRTY = """
import resource, signal
for place in ("/work", "/tmp", "/dev/shm"):
    os.makedirs(place + "/d/e"); open(place + "/f", "w").write("left"); os.chmod(place + "/f", 0)
    attempt(lambda: os.chmod(place, 0o500))
os.umask(0o777); os.nice(5); os.chdir("/")
signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 30))
for number in (1, 2, 13, 15): signal.signal(number, signal.SIG_IGN)
for which in (resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC, resource.RLIMIT_STACK):
    attempt(lambda: resource.setrlimit(which, (16, 16)))
attempt(lambda: open("/proc/self/oom_score_adj", "w").write("900"))
attempt(lambda: os.sched_setaffinity(0, {max(os.sched_getaffinity(0))}))
attempt(lambda: os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0)))
attempt(lambda: socket.sethostname("mine")); libc.semget(0x6275726e, 1, 0o1666)
libc.prctl(36, 1, 0, 0, 0); libc.prctl(4, 0, 0, 0, 0); libc.prctl(15, b"left", 0, 0, 0)
held = socket.create_server(("127.0.0.1", 40404))
"""


def test_a_box_is_as_fresh_after_a_hostile_one_as_before(pool: SandboxPool, prelude: str) -> None:
    """Warm pools too: what was made ahead, and whatever is used again."""

    async def profile() -> bytes:
        async with pool.acquire() as box:
            result = await box.exec(python_argv("-c", prelude + PROFILE))
            assert result.status is ExecStatus.OK, result
            return result.stdout

    async def main() -> tuple[bytes, list[bytes]]:
        before = await profile()
        for keep in (False, Feature.BACKGROUND in pool.capabilities.features):
            async with pool.acquire() as box:
                code = prelude + DIRTY + ("import time; time.sleep(0)" if keep else "")
                dirty = await box.exec(python_argv("-c", code), keep=keep)
                assert dirty.status is ExecStatus.OK, dirty
        return before, [await profile() for _ in range(5)]

    before, later = asyncio.run(main())
    for seen in later:
        assert seen.decode().splitlines() == before.decode().splitlines()


def test_a_command_finds_nothing_but_files_of_the_one_before(
    pool: SandboxPool, prelude: str
) -> None:
    files = prelude + TEXT + PROFILE[PROFILE.index("print(sorted(os.environ") :]
    files = files.replace('("/", "/work", "/tmp", "/dev/shm", "/dev/null")', '("/", "/dev/null")')
    # SysV objects live as long as the box.
    dirty = prelude + DIRTY.replace("libc.semget(0x6275726e, 1, 0o1666)", "")

    async def main() -> list[ExecResult]:
        async with pool.acquire() as box:
            return [
                await box.exec(python_argv("-c", files)),
                await box.exec(python_argv("-c", dirty.replace("0o500", "0o700"))),
                await box.exec(python_argv("-c", files)),
            ]

    before, dirtied, after = asyncio.run(main())
    assert dirtied.status is ExecStatus.OK, dirtied
    assert after.stdout.decode().splitlines() == before.stdout.decode().splitlines()


def test_no_two_boxes_share_an_address_space_or_a_random_state(pool: SandboxPool) -> None:
    """Of commands; jobs of a warm template share the template's layout: a named exception."""
    code = """
import ctypes, os, random, uuid
print(id(random), os.urandom(8).hex(), random.random(), uuid.uuid4(),
      open("/proc/self/auxv", "rb").read().hex()[:64], hash("text"))
"""

    async def main() -> list[list[bytes]]:
        seen = []
        for _ in range(3):
            async with pool.acquire() as box:
                result = await box.exec(("python3", "-S", "-c", code))
                assert result.status is ExecStatus.OK, result
                seen.append(result.stdout.split())
        return seen

    seen = asyncio.run(main())
    for position in (1, 2, 3):
        assert len({words[position] for words in seen}) == 3
    if pool.capabilities.isolation is not Isolation.USER_KERNEL:
        assert len({words[0] for words in seen}) > 1


def test_a_lock_on_a_shared_file_stops_no_command(pool: SandboxPool) -> None:
    """Boxes see locks that others hold on programs of the host; running them needs none."""

    async def main() -> ExecResult:
        async with pool.acquire() as box:
            return await box.exec(("env", "true"), limits=Limits(wall_s=10))

    with open("/usr/bin/env", "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert asyncio.run(main()).status is ExecStatus.OK
