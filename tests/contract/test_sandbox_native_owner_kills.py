"""Owners killed with -9 at random moments, while boxes are made too, leave nothing.

Each round is a process with a pool, forked from process 1 of a pid namespace of its own: what is to
be seen in there belongs to the rounds and to nobody else, orphans become children of process 1, and
no signal can reach further. Once it has no child left, it compares what the kernel has with before.
"""

import asyncio
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from burnish.core.errors import UserError
from burnish.sandbox.config import SandboxConfig
from burnish.sandbox.native.pool import NativePool

OWNERS = """
import asyncio, contextlib, json, os, random, signal, sys, time
from pathlib import Path
from burnish.core.boxes import Feature, Limits, Policy
from burnish.sandbox.config import SandboxConfig
from burnish.sandbox.leftovers import sweep_leftovers
from burnish.sandbox.native.pool import NativePool

config, num_rounds = SandboxConfig.model_validate_json(sys.argv[1]), int(sys.argv[2])
tells, told = os.pipe()

async def use(pool, dice):
    while True:
        policy = Policy(deterministic=dice.random() < 0.2)
        async with pool.acquire(policy=policy) as box:
            os.write(told, b"b")
            await box.write_file("f", b"x" * dice.choice((1, 100_000)))
            kind = dice.randrange(5)
            if kind == 0:
                await box.exec(("sh", "-c", "setsid sleep 1000 & sleep 1000 & wait"),
                               limits=Limits(wall_s=0.02), keep=True)
            elif kind == 1:
                snapshot = await box.snapshot()
                await box.exec(("rm", "f"))
                await box.rollback(snapshot)
            elif kind == 2:
                async with box.fork(2) as forks:
                    await forks[1].exec(("true",))
            else:
                await box.exec(("sh", "-c", "cp f g; sleep 0.00%d" % dice.randrange(9)))

async def warm(pool):
    while Feature.WARM_PYTHON in pool.capabilities.features:
        async with pool.acquire_python(("json",)) as box:
            await box.python("open('f', 'w').write('x')")

async def own(dice):
    pool = NativePool(config)
    os.write(told, b"p")
    async with asyncio.TaskGroup() as group:
        for _ in range(3):
            group.create_task(use(pool, dice))
        if dice.random() < 0.3:
            group.create_task(warm(pool))

def visible():
    pids = [name for name in os.listdir("/proc") if name.isdigit()]
    spaces = {os.readlink(f"/proc/{pid}/ns/{name}")
              for pid in pids for name in os.listdir(f"/proc/{pid}/ns")}
    files = sorted(os.listdir("/proc/self/fd"))
    return pids, sorted(spaces), Path("/proc/self/mountinfo").read_text(), files

def groups():
    mine = "burnish-%d-" % os.stat("/proc/self/ns/pid").st_ino
    return [Path(folder) for folder, _, _ in os.walk("/sys/fs/cgroup") if mine in folder]

def members():
    lists = [group / "cgroup.procs" for group in groups()]
    return [pid for path in lists if path.exists() for pid in path.read_text().split()]

def kill_one(dice):
    '''What it had told by then.'''
    child = os.fork()
    if child == 0:
        asyncio.run(own(dice))
        os._exit(3)
    told_so_far = b""
    # From the first moment, from that of a pool on, or from that of a box on.
    for _ in range(dice.randrange(3)):
        told_so_far += os.read(tells, 1)
    time.sleep(dice.random() * dice.choice((0.001, 0.01, 0.1)))
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), status
    with contextlib.suppress(ChildProcessError):
        while True:
            os.wait()
    os.set_blocking(tells, False)
    with contextlib.suppress(BlockingIOError):
        told_so_far += os.read(tells, 1 << 16)
    os.set_blocking(tells, True)
    return told_so_far

def survived(*_):
    raise TimeoutError(f"a process survived: {visible()[0]}")

# By default process 1 would ignore it.
signal.signal(signal.SIGALRM, survived)
before = visible()
seen = {"early": 0, "pool": 0, "box": 0}
most_groups = 0
for number in range(num_rounds):
    signal.alarm(100)
    said = kill_one(random.Random(number))
    seen["box" if b"b" in said else "pool" if b"p" in said else "early"] += 1
    after = visible()
    assert after == before, (number, before, after)
    assert members() == [], number
    most_groups = max(most_groups, len(groups()))
signal.alarm(100)
sweep_leftovers()
print(json.dumps({"seen": seen, "most": most_groups, "groups": list(map(str, groups()))}))
"""
UNSHARE = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]


def loop_devices(folder: Path) -> list[str]:
    files = Path("/sys/block").glob("loop*/loop/backing_file")
    return [name for name in (path.read_text() for path in files) if name.startswith(f"{folder}/")]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["c", "python", "c-disk"])
def test_an_owner_killed_at_any_moment_leaves_nothing(kind: str, tmp_path: Path) -> None:
    helper, _, storage = kind.partition("-")
    config = SandboxConfig.model_validate(
        {"max_boxes": 12, "warm_boxes": 1, "helper": helper, "storage": storage or "memory"}
        | {"storage_directory": tmp_path}
    )
    if os.getuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("needs root and unshare (util-linux): a pid namespace of its own")
    try:
        pool = NativePool(config)
    except UserError as error:
        pytest.skip(str(error))
    asyncio.run(pool.close())
    num_rounds = 120 if kind == "c" else 40
    result = subprocess.run(
        [*UNSHARE, sys.executable, "-c", OWNERS, config.model_dump_json(), str(num_rounds)],
        env={**os.environ, "TMPDIR": str(tmp_path), "XDG_RUNTIME_DIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert result.returncode == 0
    said = json.loads(result.stdout)
    # Else nothing was killed that could have left something.
    assert min(said["seen"]["early"], said["seen"]["box"]) >= num_rounds // 6, said
    assert said["groups"] == []
    assert loop_devices(tmp_path) == []
    # The sweep looks for the socket of a daemon in a directory that it makes.
    assert [path for path in tmp_path.rglob("*") if path != tmp_path / "burnish"] == []
