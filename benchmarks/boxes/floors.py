"""What the sandbox is measured against: no box at all, bubblewrap, crun, tar."""

import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from burnish.core.errors import UserError
from burnish.sandbox.bubblewrap.inspection import find_bwrap
from burnish.sandbox.host_view import system_paths

ENV = {"PATH": "/usr/bin:/bin"}
MODULES = (
    "argparse", "ast", "asyncio", "base64", "collections", "concurrent.futures", "contextlib",
    "csv", "dataclasses", "datetime", "decimal", "email.message", "fractions", "functools",
    "hashlib", "heapq", "http.client", "inspect", "itertools", "json", "logging", "pathlib",
    "random", "re", "statistics", "string", "subprocess", "tempfile", "typing", "unittest",
)  # fmt: skip
"""Thirty modules of the standard library that a small job imports."""
JOB = f"import {', '.join(MODULES)}\nprint(json.dumps(sum(range(1000))))"


_TO_NULL = (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)


def spawn(argv: tuple[str, ...], *, prints: bool = False) -> None:
    """`posix_spawn` and wait; what it `prints` goes nowhere."""
    pid = os.posix_spawnp(argv[0], argv, ENV, file_actions=[_TO_NULL] if prints else None)
    _, status = os.waitpid(pid, 0)
    assert status == 0, (argv, status)


def bwrap_cycle() -> Callable[[], None] | str:
    """One `/bin/true` in bare bubblewrap, or why not: no filter, limits or control group."""
    try:
        bwrap, _ = find_bwrap()
    except UserError as error:
        return str(error)
    options = [bwrap, "--unshare-all", "--unshare-user", "--die-with-parent", "--new-session"]
    for entry in system_paths():
        how = ["--symlink", entry.link] if entry.link else ["--ro-bind", entry.path]
        options += [*how, entry.path]
    options += ["--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp", "--tmpfs", "/work"]
    argv = (*options, "--", "/bin/true")
    return lambda: spawn(argv)


@contextmanager
def crun_cycle() -> Iterator[Callable[[], float] | str]:
    """Milliseconds of one `/bin/true` in a crun container with the same view, or why not.

    crun 1.8 refuses a machine whose unified hierarchy has a single controller, so a child that does
    not see that hierarchy runs and times it; it gets a line for each cycle.
    """
    crun = shutil.which("crun")
    if crun is None or os.getuid() != 0:
        yield "crun needs root here" if crun else "crun is missing (sudo apt-get install crun)"
        return
    with tempfile.TemporaryDirectory() as folder:
        bundle = Path(folder)
        (bundle / "rootfs").mkdir()
        for entry in system_paths():
            if entry.link:
                (bundle / "rootfs" / entry.path.strip("/")).symlink_to(entry.link)
        (bundle / "config.json").write_text(json.dumps(_bundle()), encoding="utf-8")
        script = 'umount /sys/fs/cgroup/unified 2>/dev/null; exec "$@"'
        timer = [sys.executable, __file__, crun, folder]
        child = subprocess.Popen(
            ["unshare", "-m", "/bin/sh", "-c", script, "sh", *timer],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        with child:
            assert child.stdin is not None
            assert child.stdout is not None
            assert child.stderr is not None

            def cycle() -> float:
                child.stdin.write("\n")
                child.stdin.flush()
                return float(child.stdout.readline() or "nan")

            if math.isnan(cycle()):
                yield f"crun does not run here: {child.stderr.read().strip()[-200:]}"
            else:
                yield cycle
            child.stdin.close()


def _time_crun(crun: str, folder: str) -> None:
    for number, _ in enumerate(sys.stdin):
        name = f"bench-{os.getpid()}-{number}"
        start = time.perf_counter()
        spawn((crun, "--root", f"{folder}/state", "run", "-b", folder, name))
        print((time.perf_counter() - start) * 1e3, flush=True)


def _bundle() -> dict[str, object]:
    binds = [
        {"destination": e.path, "source": e.path, "type": "bind", "options": ["rbind", "ro"]}
        for e in system_paths()
        if e.link is None
    ]
    tmp = [
        {"destination": place, "type": "tmpfs", "source": "tmpfs", "options": ["size=64m"]}
        for place in ("/tmp", "/work")
    ]
    proc = [{"destination": "/proc", "type": "proc", "source": "proc"}]
    dev = [{"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["size=64k"]}]
    kinds = ("pid", "network", "ipc", "uts", "mount")
    return {
        "ociVersion": "1.0.2",
        "process": {
            "args": ["/bin/true"],
            "cwd": "/",
            "env": [f"PATH={ENV['PATH']}"],
            "user": {"uid": 0, "gid": 0},
            "noNewPrivileges": True,
        },
        "root": {"path": "rootfs"},
        "mounts": [*binds, *proc, *dev, *tmp],
        "linux": {
            "namespaces": [{"type": kind} for kind in kinds],
            "resources": {"memory": {"limit": 256 * 2**20}, "pids": {"limit": 64}},
        },
    }


def make_tree(folder: Path, *, num_files: int, num_bytes: int) -> None:
    """Files of equal size in directories of a hundred."""
    data = os.urandom(num_bytes // num_files)
    for number in range(num_files):
        path = folder / f"d{number // 100}" / f"f{number}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


if __name__ == "__main__":
    _time_crun(*sys.argv[1:])
