"""Owners killed with -9 at random moments, while boxes are made too, and what the kernel has then.

    python killed_owners.py CONFIG_JSON NUM_ROUNDS       in a pid namespace of its own, as process 1

Each round is a process with a pool, forked from process 1 of that namespace: what is to be seen in
there belongs to the rounds and to nobody else, orphans become children of process 1, and no signal
can reach further. Once it has no child left, it compares what the kernel has with before.
"""

import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from burnish.core.boxes import Feature, Limits, Policy
from burnish.sandbox.config import SandboxConfig
from burnish.sandbox.leftovers import sweep_leftovers
from burnish.sandbox.native.pool import NativePool

UNSHARE = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]


def kill_owners(config: SandboxConfig, num_rounds: int, folder: Path) -> dict[str, Any]:
    """Run the rounds, with all temporary files below `folder`.

    Returns:
        `seen`: how far owners were when they were killed, `boxes`: how many they had made, `groups`
        that stayed after a sweep.

    Raises:
        subprocess.CalledProcessError: something stayed behind; it is on stderr.
    """
    result = subprocess.run(
        [*UNSHARE, sys.executable, __file__, config.model_dump_json(), str(num_rounds)],
        env={
            **os.environ,
            "TMPDIR": str(folder),
            "XDG_RUNTIME_DIR": str(folder),
            "PYTHONPATH": os.pathsep.join(os.path.abspath(path) for path in sys.path if path),
        },
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    said: dict[str, Any] = json.loads(result.stdout)
    return said


class Rounds:
    """Process 1 of the namespace."""

    def __init__(self, config: SandboxConfig) -> None:
        self._config = config
        self._tells, self._told = os.pipe()

    def run(self, num_rounds: int) -> dict[str, Any]:
        def survived(*_: object) -> None:
            raise TimeoutError(f"a process survived: {visible()[0]}")

        # By default process 1 would ignore it.
        signal.signal(signal.SIGALRM, survived)
        before = visible()
        seen = {"early": 0, "pool": 0, "box": 0}
        num_boxes = most_groups = 0
        for number in range(num_rounds):
            signal.alarm(100)
            said = self._kill_one(random.Random(number))
            seen["box" if b"b" in said else "pool" if b"p" in said else "early"] += 1
            num_boxes += said.count(b"b")
            after = visible()
            assert after == before, (number, before, after)
            assert members() == [], number
            most_groups = max(most_groups, len(groups()))
        signal.alarm(100)
        sweep_leftovers()
        left = list(map(str, groups()))
        return {"seen": seen, "boxes": num_boxes, "most": most_groups, "groups": left}

    def _kill_one(self, dice: random.Random) -> bytes:
        """What it had told by then."""
        child = os.fork()
        if child == 0:
            asyncio.run(self._own(dice))
            os._exit(3)
        told_so_far = b""
        # From the first moment, from that of a pool on, or from that of a box on.
        for _ in range(dice.randrange(3)):
            told_so_far += os.read(self._tells, 1)
        time.sleep(dice.random() * dice.choice((0.001, 0.01, 0.1)))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status), status
        with contextlib.suppress(ChildProcessError):
            while True:
                os.wait()
        os.set_blocking(self._tells, False)
        with contextlib.suppress(BlockingIOError):
            told_so_far += os.read(self._tells, 1 << 16)
        os.set_blocking(self._tells, True)
        return told_so_far

    async def _own(self, dice: random.Random) -> None:
        pool = NativePool(self._config)
        os.write(self._told, b"p")
        async with asyncio.TaskGroup() as group:
            for _ in range(3):
                group.create_task(self._use(pool, dice))
            if dice.random() < 0.3:
                group.create_task(warm(pool))

    async def _use(self, pool: NativePool, dice: random.Random) -> None:
        while True:
            policy = Policy(deterministic=dice.random() < 0.2)
            async with pool.acquire(policy=policy) as box:
                os.write(self._told, b"b")
                await box.write_file("f", b"x" * dice.choice((1, 100_000)))
                kind = dice.randrange(5)
                if kind == 0:
                    await box.exec(
                        ("sh", "-c", "setsid sleep 1000 & sleep 1000 & wait"),
                        limits=Limits(wall_s=0.02),
                        keep=True,
                    )
                elif kind == 1:
                    snapshot = await box.snapshot()
                    await box.exec(("rm", "f"))
                    await box.rollback(snapshot)
                elif kind == 2:
                    async with box.fork(2) as forks:
                        await forks[1].exec(("true",))
                else:
                    await box.exec(("sh", "-c", f"cp f g; sleep 0.00{dice.randrange(9)}"))


async def warm(pool: NativePool) -> None:
    while Feature.WARM_PYTHON in pool.capabilities.features:
        async with pool.acquire_python(("json",)) as box:
            await box.python("open('f', 'w').write('x')")


def visible() -> tuple[list[str], list[str], str, list[str]]:
    """Processes, namespaces, mounts, open files."""
    pids = [name for name in os.listdir("/proc") if name.isdigit()]
    spaces = {
        os.readlink(f"/proc/{pid}/ns/{name}")
        for pid in pids
        for name in os.listdir(f"/proc/{pid}/ns")
    }
    files = sorted(os.listdir("/proc/self/fd"))
    return pids, sorted(spaces), Path("/proc/self/mountinfo").read_text(), files


def groups() -> list[Path]:
    """Control groups that pools of this namespace made."""
    inode = Path("/proc/self/ns/pid").stat().st_ino
    mine = f"burnish-{inode}-"
    return [Path(folder) for folder, _, _ in os.walk("/sys/fs/cgroup") if mine in folder]


def members() -> list[str]:
    """Processes in those."""
    lists = [group / "cgroup.procs" for group in groups()]
    return [pid for path in lists if path.exists() for pid in path.read_text().split()]


if __name__ == "__main__":
    rounds = Rounds(SandboxConfig.model_validate_json(sys.argv[1]))
    sys.stdout.write(json.dumps(rounds.run(int(sys.argv[2]))))
