"""Native boxes that are used and killed at random, and what a pool holds before and after."""

import asyncio
import contextlib
import os
import random
import signal
import time
from collections import Counter
from pathlib import Path

from burnish.core.boxes import ExecStatus, Limits
from burnish.core.errors import ClassifiedFailure, UserError
from burnish.sandbox.native.pool import NativePool
from burnish.sandbox.native.stateful import NativeBox
from burnish.sandbox.proctree import Process, read_processes

Held = dict[str, int]
"""Number of things by kind."""


def children(root: int) -> list[Process]:
    return [process for process in read_processes() if process.parent == root]


def descendants(root: int) -> list[Process]:
    processes = read_processes()
    found: list[Process] = []
    parents = {root}
    while new := [p for p in processes if p.parent in parents and p not in found]:
        found += new
        parents = {p.pid for p in new}
    return found


def control_groups(owner_pid: int) -> list[Path]:
    owner = f"-{owner_pid}-"
    found = []
    for folder, names, _ in os.walk("/sys/fs/cgroup"):
        found += [Path(folder, name) for name in names if owner in folder or owner in name]
    return found


def has_prepared(helper: int) -> bool:
    """It makes the child of its next box ahead, or its network where boxes are born in a group."""
    networks = [path for path in open_files(helper) if path.startswith("net:")]
    return len(children(helper)) + len(networks) > 1


def open_files(pid: int) -> list[str]:
    """What its descriptors stand for; those that it closes meanwhile are left out."""
    found = []
    for name in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):
            found.append(os.readlink(f"/proc/{pid}/fd/{name}"))
    return found


def held(pool: NativePool) -> Held:
    """What a pool without boxes in use holds; its warm boxes are ended, so that it is exact."""
    station = pool._stations.host
    pool._warm.forget(station)
    asyncio.run(settled(pool))
    groups = pool._stations._groups
    for group in groups._free if groups else ():
        group.close()
    seen: Held = {}
    while (now := survey(pool)) != seen:
        # A box that is dying may look like one that was made ahead.
        seen = now
        time.sleep(0.01)
    return now


def survey(pool: NativePool) -> Held:
    """What is there at this moment, once the helper has made something ahead."""
    station = pool._stations.host
    helper = station.helper.pid
    while pool._config.helper == "c" and not has_prepared(helper):
        continue
    opened = open_files(helper)
    groups = pool._stations._groups
    return {
        "processes": len(descendants(helper)),
        "own files": len(os.listdir("/proc/self/fd")),
        "helper files": len(opened) - opened.count("/"),
        # That of a box that was made ahead may be there or not.
        "helper file systems": max(0, opened.count("/") - 1),
        "helper mounts": len(Path(f"/proc/{helper}/mountinfo").read_text().splitlines()),
        "layers": len(station.layers.alive),
        "holds": station.layers.num_holds,
        "places": pool._places.num_taken,
        "disks": len(station.disks) if station.disks is not None else 0,
        "groups in use": len(groups._all) - len(groups._free) if groups else 0,
    }


async def settled(pool: NativePool) -> None:
    """All that was asked of the helper has been answered."""
    helper = pool._stations.host.helper
    uppers = pool._stations.uppers
    while (helper.alive and helper._pending) or (uppers is not None and uppers.is_busy):
        with helper.watching():
            await asyncio.sleep(0.001)


async def use(box: NativeBox, dice: random.Random) -> None:
    kind = dice.randrange(7)
    if kind == 0:
        result = await box.exec(("sh", "-c", "setsid sleep 1000 & exit 3"))
        assert result.status in (ExecStatus.EXIT, ExecStatus.INFRA_ERROR)
    elif kind == 1:
        await box.exec(("sleep", "1000"), keep=True, limits=Limits(wall_s=0.01))
    elif kind == 2:
        await box.write_file("f", b"x")
        snapshot = await box.snapshot()
        try:
            await box.exec(("rm", "f"))
            await box.rollback(snapshot)
        finally:
            box._book.forget(snapshot)
    elif kind == 3:
        await box.exec(("sh", "-c", "echo x > y"))
        async with box.fork(2) as forks:
            await forks[1].exec(("true",))
    elif kind == 4:
        running = asyncio.create_task(box.exec(("sleep", "1000")))
        await asyncio.sleep(dice.random() * 0.003)
        running.cancel()
        await asyncio.wait((running,))
    else:
        await box.exec(("true",))


def kill_something(pool: NativePool, dice: random.Random, killed: Counter[str]) -> None:
    """A box, now and then the helper itself."""
    helper = pool.helper_pids[0]
    inits = children(helper)
    victim = helper if dice.randrange(8) == 0 or not inits else dice.choice(inits).pid
    with contextlib.suppress(ProcessLookupError):
        os.kill(victim, signal.SIGKILL)
        killed["helpers" if victim == helper else "boxes"] += 1


async def cycles(pool: NativePool, count: int, seed: int, killed: Counter[str]) -> None:
    """Three at once; one in twenty kills something."""

    async def one(number: int) -> None:
        dice = random.Random(seed * 1_000_003 + number)
        with contextlib.suppress(ClassifiedFailure, UserError):
            async with pool.acquire() as box:
                with contextlib.suppress(OSError):
                    await use(box, dice)
                if dice.randrange(20) == 0:
                    kill_something(pool, dice, killed)

    for first in range(0, count, 3):
        async with asyncio.TaskGroup() as group:
            for number in range(first, first + 3):
                group.create_task(one(number))


def kill_cycles(
    pool: NativePool, count: int
) -> tuple[dict[str, int], dict[str, int], Counter[str]]:
    """What the pool holds before and after so many cycles, and what was killed meanwhile."""
    killed: Counter[str] = Counter()
    asyncio.run(cycles(pool, 6, 1, killed))
    before = held(pool)
    for seed in range(2, 5):
        # A loop of its own each time: boxes that stay warm outlive it.
        asyncio.run(cycles(pool, count // 3, seed, killed))
    asyncio.run(cycles(pool, 6, 1, killed))
    # Layers and holds of a helper that was killed went with it.
    return before, held(pool), killed
