"""What boxes cost, against no box, bubblewrap, crun and tar.

    python benchmarks/sandbox.py [--quick] [--json FILE] [--only NAME]

Boxes and peers are measured in turn, so that whatever else the machine does meets all alike;
figures are medians. Peers do less: bare bubblewrap has the same namespaces and mounts but no
filter, limits, control group, input, output or watching; posix_spawn has none of all that.
"""

import argparse
import asyncio
import contextlib
import json
import math
import os
import shutil
import statistics
import tarfile
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

from boxes.disks import measure
from boxes.floors import JOB, MODULES, bwrap_cycle, crun_cycle, make_tree, spawn
from boxes.kills import killed_boxes, killed_owners

from burnish.core.boxes import ExecStatus, Limits, Sandbox
from burnish.core.errors import UserError
from burnish.sandbox.config import SandboxConfig
from burnish.sandbox.interpreter import find_python
from burnish.sandbox.native.pool import NativePool
from burnish.sandbox.proctree import read_processes

TRUE = ("/bin/true",)
LIMITS = Limits(wall_s=120, cpu_s=120)
Row = dict[str, Any]


def row(name: str, value: float, peer: str, peer_value: float, target: float | None, n: int) -> Row:
    """A row in milliseconds, lower is better."""
    ratio = value / peer_value
    return {
        "name": f"sandbox: {name}",
        "value": round(value, 3),
        "unit": "ms",
        "peer": peer,
        "peer_value": round(peer_value, 3),
        "ratio": round(ratio, 4),
        "target": target,
        "ok": None if target is None else ratio <= target,
        "n": n,
        "note": "median",
    }


def absent(name: str, peer: str, reason: str) -> Row:
    keys = ("value", "peer_value", "ratio", "target", "ok")
    named = {"name": f"sandbox: {name}", "unit": "ms", "peer": peer, "n": 0, "note": reason}
    return dict.fromkeys(keys) | named


def count(name: str, value: float, unit: str, target: float, ok: bool, note: str) -> Row:
    keys = ("peer_value", "ratio")
    fields = {"name": f"sandbox: {name}", "value": value, "unit": unit, "peer": "target"}
    return dict.fromkeys(keys) | fields | {"target": target, "ok": ok, "n": 1, "note": note}


async def timed(action: Callable[[], Awaitable[object] | object]) -> float:
    start = time.perf_counter()
    waiting = action()
    if isinstance(waiting, Awaitable):
        await waiting
    return (time.perf_counter() - start) * 1e3


@contextlib.asynccontextmanager
async def pool_of(**options: Any) -> AsyncIterator[NativePool]:
    pool = await asyncio.to_thread(NativePool, SandboxConfig(**options))
    try:
        yield pool
    finally:
        await pool.close()


async def in_box(box: Sandbox, argv: tuple[str, ...] = TRUE) -> None:
    result = await box.exec(argv, limits=LIMITS)
    assert result.status is ExecStatus.OK, result


async def until_warm(pool: NativePool) -> None:
    for _ in range(60_000):
        if pool.stats().warm:
            return
        await asyncio.sleep(0.001)
    raise TimeoutError("no box became ready in a minute")


async def starts(n: int) -> AsyncIterator[Row]:
    """Commands in live, warm and cold boxes."""
    bwrap = bwrap_cycle()
    times: dict[str, list[float]] = {
        key: [] for key in ("spawn", "live", "warm", "cold", "bwrap", "crun")
    }
    with crun_cycle() as crun:
        async with (
            pool_of(max_boxes=4, warm_boxes=0) as cold,
            pool_of(max_boxes=4, warm_boxes=2) as pool,
            pool.acquire() as live,
        ):
            await in_box(live)
            for _ in range(n):
                # What is refilled behind the last round would slow down this one.
                await asyncio.sleep(0.005)
                await until_warm(pool)
                times["spawn"].append(await timed(lambda: spawn(TRUE)))
                times["live"].append(await timed(lambda: in_box(live)))
                times["cold"].append(await timed(lambda: cycle(cold)))
                if callable(bwrap):
                    times["bwrap"].append(await timed(bwrap))
                if callable(crun):
                    times["crun"].append(crun())
                async with contextlib.AsyncExitStack() as stack:
                    times["warm"].append(await timed(lambda: first(pool, stack)))
    medians = {key: statistics.median(found) for key, found in times.items() if found}
    yield row("exec in a live box", medians["live"], "posix_spawn", medians["spawn"], 1.5, n)
    yield row("warm acquire, first exec", medians["warm"], "posix_spawn", medians["spawn"], 2, n)
    name = "cold create, exec, destroy"
    for peer, run, target in (("bubblewrap", bwrap, 0.6), ("crun", crun, 0.4)):
        if callable(run):
            yield row(name, medians["cold"], peer, medians[peer.replace("bubble", "b")], target, n)
        else:
            yield absent(name, peer, str(run))


async def first(pool: NativePool, stack: contextlib.AsyncExitStack) -> None:
    await in_box(await stack.enter_async_context(pool.acquire()))


async def cycle(pool: NativePool) -> None:
    async with pool.acquire() as box:
        await in_box(box)


async def python_jobs(n: int) -> AsyncIterator[Row]:
    """A small job that imports thirty modules."""
    name = "Python job with 30 modules, warm"
    python = find_python()
    if python is None:
        yield absent(name, "plain python", "no python3 below /usr")
        return
    plain_job = (python, "-I", "-S", "-B", "-c", JOB)
    plain, warm = [], []
    async with (
        pool_of(max_boxes=2, warm_boxes=1) as pool,
        pool.acquire_python(modules=MODULES) as box,
    ):
        for _ in range(n):
            plain.append(await timed(lambda: spawn(plain_job, prints=True)))
            warm.append(await timed(lambda: python_job(box)))
    medians = statistics.median(warm), statistics.median(plain)
    yield row(name, medians[0], "plain python", medians[1], 0.15, n)


async def python_job(box: Any) -> None:
    result = await box.python(JOB, limits=LIMITS)
    assert result.status is ExecStatus.OK, result


async def states(n: int) -> AsyncIterator[Row]:
    """Snapshot and rollback of 50 MB in 2,000 files; tar of the same is the peer."""
    times: dict[str, list[float]] = {
        key: [] for key in ("snapshot", "snapshot+exec", "rollback", "rollback+exec", "c", "x")
    }
    limits = Limits(wall_s=120, cpu_s=120, disk_bytes=2**28, memory_bytes=2**30)
    with tempfile.TemporaryDirectory() as folder:
        make_tree(tree := Path(folder, "tree"), num_files=2000, num_bytes=50_000_000)
        archive = Path(folder, "tree.tar")
        async with pool_of(max_boxes=2, warm_boxes=0) as pool:
            for number in range(n):
                if number % (5 if n < 100 else 1) == 0:
                    times["c"].append(await timed(lambda: tar(archive, tree)))
                    target = Path(folder, f"x{number}")
                    times["x"].append(await timed(lambda at=target: untar(archive, at)))
                    shutil.rmtree(target)
                async with pool.acquire() as box:
                    await fill(box, limits)
                    await one_state(box, limits, times)
    medians = {key: statistics.median(found) for key, found in times.items()}
    for key, peer, target in (
        ("snapshot", "c", 0.02),
        ("snapshot+exec", "c", None),
        ("rollback", "x", 0.02),
        ("rollback+exec", "x", None),
    ):
        name = f"{key} of 50 MB in 2,000 files"
        found = row(name, medians[key], f"tar {peer}", medians[peer], target, n)
        yield found | {"note": f"median of {n}, tar of {len(times[peer])}"}
    for key, most_ms in (("snapshot", 1), ("rollback", 2)):
        found_ms, note = round(medians[key], 3), f"median of {n}, no peer"
        yield count(f"{key}, by itself", found_ms, "ms", most_ms, found_ms <= most_ms, note)


async def fill(box: Sandbox, limits: Limits) -> None:
    script = "i=0; while [ $i -lt 20 ]; do mkdir d$i; cd d$i; "
    script += "head -c 2500000 /dev/urandom | split -a 3 -b 25000 - f; cd ..; i=$((i+1)); done"
    result = await box.exec(("sh", "-c", script), limits=limits)
    assert result.status is ExecStatus.OK, result


async def one_state(box: Any, limits: Limits, times: dict[str, list[float]]) -> None:
    async def then_exec(action: Callable[[], Awaitable[Any]], key: str) -> Any:
        start = time.perf_counter()
        found = await action()
        times[key].append((time.perf_counter() - start) * 1e3)
        assert (await box.exec(TRUE, limits=limits)).status is ExecStatus.OK
        times[f"{key}+exec"].append((time.perf_counter() - start) * 1e3)
        return found

    snapshot = await then_exec(box.snapshot, "snapshot")
    dirty = await box.exec(("sh", "-c", "rm -r d0 d1; echo x > new"), limits=limits)
    assert dirty.status is ExecStatus.OK, dirty
    await then_exec(lambda: box.rollback(snapshot), "rollback")
    check = await box.exec(("sh", "-c", "ls d0 | wc -l; ls"), limits=limits)
    assert check.stdout.split()[0] == b"100", check
    assert b"new" not in check.stdout, check


def tar(archive: Path, tree: Path) -> None:
    with tarfile.open(archive, "w") as file:
        file.add(tree, "tree")


def untar(archive: Path, target: Path) -> None:
    with tarfile.open(archive) as file:
        file.extractall(target, filter="data")


async def forks(n: int) -> AsyncIterator[Row]:
    """Sixteen forks of one state, the first command of each answered."""
    forked, spawned = [], []
    async with pool_of(max_boxes=17, warm_boxes=0) as pool, pool.acquire() as parent:
        await parent.write_file("state", b"x" * 1000)
        snapshot = await parent.snapshot()
        for _ in range(n):
            start = time.perf_counter()
            async with parent.fork(16, snapshot) as children:
                await asyncio.gather(*(in_box(child) for child in children))
                forked.append((time.perf_counter() - start) * 1e3)
            spawned.append(await timed(lambda: spawn(TRUE)))
    medians = statistics.median(forked), statistics.median(spawned)
    yield row("16 forks, first exec of each", medians[0], "posix_spawn", medians[1], 60, n)


async def crowd(num_boxes: int) -> AsyncIterator[Row]:
    """Many boxes alive at once."""
    async with pool_of(max_boxes=1, warm_boxes=0) as pool:
        tightest = pool.room()[0]
    num_boxes = min(num_boxes, tightest.most - 1)
    before = memory_used_bytes()
    async with pool_of(max_boxes=num_boxes + 1, warm_boxes=0) as pool:
        start = time.perf_counter()
        async with contextlib.AsyncExitStack() as stack:
            boxes = await stack.enter_async_context(pool.acquire_many(num_boxes))
            seconds = time.perf_counter() - start
            used = memory_used_bytes() - before
            gate = asyncio.Semaphore(8)

            async def alive(box: Sandbox) -> bool:
                async with gate:
                    return (await box.exec(TRUE, limits=LIMITS)).status is ExecStatus.OK

            answered = sum(await asyncio.gather(*map(alive, boxes)))
    note = f"{seconds:.1f} s to make, {used / num_boxes / 2**20:.2f} MiB each; "
    note += f"most {tightest.most}: {tightest.what}"
    gib = used / 2**30
    target = 5 * num_boxes / 4000
    yield count(f"{num_boxes} live boxes", round(gib, 2), "GiB", target, gib <= target, note)
    lost = num_boxes - answered
    yield count(f"lost of {num_boxes} live boxes", lost, "boxes", 0, lost == 0, "each ran true")


async def disks(n: int) -> AsyncIterator[Row]:
    """Boxes that write to a disk; those that write to memory are the peer."""
    big_bytes, found = 2_000_000_000, {}
    for storage in ("memory", "disk"):
        async with pool_of(max_boxes=2, warm_boxes=0, storage=storage) as pool:
            found[storage] = await measure(pool, memory_used_bytes, n, big_bytes)
    memory, disk = found["memory"], found["disk"]
    peer, note = "memory box", "of the host, MemAvailable; the job writes 2 GB"
    yield row("cold cycle on a disk", disk.cycle_ms, peer, memory.cycle_ms, None, n)
    name = "write and fsync of 256 MiB to a disk"
    yield row(name, disk.write_ms, peer, memory.write_ms, None, max(1, n // 3))
    name, taken = "memory of a job that writes 2 GB to a disk", disk.host_bytes / 2**30
    ratio = disk.host_bytes / memory.host_bytes
    fields = {"peer": peer, "peer_value": round(memory.host_bytes / 2**30, 3)}
    yield count(name, round(taken, 3), "GiB", 0.2, ratio <= 0.2, note) | fields | {"ratio": ratio}


async def throughput(seconds: float) -> AsyncIterator[Row]:
    """Full cycles per second on all processors."""
    done = 0
    async with pool_of(max_boxes=8, warm_boxes=4) as pool:
        end = time.perf_counter() + seconds

        async def work() -> None:
            nonlocal done
            while time.perf_counter() < end:
                await cycle(pool)
                done += 1

        start = time.perf_counter()
        await asyncio.gather(*(work() for _ in range(4)))
        rate = done / (time.perf_counter() - start)
    note = f"{len(os.sched_getaffinity(0))} processors, 4 at once"
    yield count("full cycles per second", round(rate), "1/s", 400, rate >= 400, note)


async def kills(num_cycles: int) -> AsyncIterator[Row]:
    """Boxes, helpers and owners that are killed at random, and what stays behind."""
    pool = await asyncio.to_thread(NativePool, SandboxConfig(max_boxes=8, warm_boxes=2))
    boxes = await asyncio.to_thread(killed_boxes, pool, num_cycles)
    await pool.close()
    found = [boxes]
    if os.getuid() == 0:
        found.append(await asyncio.to_thread(killed_owners, max(10, num_cycles // 100)))
    killed = ", ".join(f"{n} {kind}" for one in found for kind, n in sorted(one.killed.items()))
    left = {kind: n for one in found for kind, n in one.left.items()}
    note = f"kill -9 of {killed}; processes, mounts, cgroups, namespaces, fds, layers, files"
    note += f"; owners had {found[1].num_cycles} boxes" if found[1:] else "; owners: needs root"
    name = f"left by {num_cycles:,} cycles with random kills"
    total = sum(map(abs, left.values()))
    yield count(name, total, "things", 0, not left, note) | {"n": num_cycles, "left": left}


def memory_used_bytes() -> int:
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return (int(fields["MemTotal"].split()[0]) - int(fields["MemAvailable"].split()[0])) * 1024


async def collected(rows: AsyncIterator[Row]) -> list[Row]:
    return [found async for found in rows]


def parts(quick: bool) -> Iterator[tuple[str, AsyncIterator[Row]]]:
    yield "starts", starts(60 if quick else 400)
    yield "python", python_jobs(20 if quick else 200)
    yield "states", states(20 if quick else 200)
    yield "forks", forks(10 if quick else 200)
    yield "disks", disks(9 if quick else 60)
    yield "kills", kills(300 if quick else 10_000)
    yield "throughput", throughput(3 if quick else 15)
    yield "crowd", crowd(200 if quick else 4000)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer rounds; 200 boxes, not 4,000")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument(
        "--only", help="one of starts, python, states, forks, disks, kills, throughput, crowd"
    )
    arguments = parser.parse_args()
    rows: list[Row] = []
    for name, part in parts(arguments.quick):
        if arguments.only not in (None, name):
            continue
        try:
            rows += asyncio.run(collected(part))
        except UserError as error:
            rows.append(absent(name, "-", str(error)))
    left = [p for p in read_processes() if p.parent == os.getpid()]
    rows.append(count("processes left", len(left), "processes", 0, not left, "after all parts"))
    for found in rows:
        print(text_of(found))
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def text_of(found: Row) -> str:
    mark = {True: "ok", False: "MISSED", None: ""}[found["ok"]]
    value = "-" if found["value"] is None else f"{found['value']:,.4g} {found['unit']}"
    against = found["note"]
    if found["peer_value"] is not None and not math.isnan(found["peer_value"]):
        against = f"{found['ratio']:.3g}x of {found['peer']} ({found['peer_value']:,.4g})"
    target = "" if found["target"] is None else f"target {found['target']:,.4g}"
    return f"{found['name']:<52} {value:>12}  {against:<40} {target} {mark}"


if __name__ == "__main__":
    main()
