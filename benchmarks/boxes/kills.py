"""What stays behind when boxes, helpers and owners are killed; the slow tests run the same."""

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from burnish.sandbox.config import SandboxConfig
from burnish.sandbox.native.pool import NativePool

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support"))

from box_kills import kill_cycles
from killed_owners import kill_owners


class Survey(NamedTuple):
    """What was done, and what it left."""

    num_cycles: int
    killed: dict[str, int]
    left: dict[str, int]
    """By kind, where it is not what it was before."""


def killed_boxes(pool: NativePool, num_cycles: int) -> Survey:
    """Cycles in one pool, in one of twenty of which a box or the helper is killed."""
    before, after, killed = kill_cycles(pool, num_cycles)
    left = {kind: after[kind] - before[kind] for kind in before if after[kind] != before[kind]}
    return Survey(num_cycles, dict(killed), left)


def killed_owners(num_owners: int) -> Survey:
    """Processes with a pool, each killed at a random moment."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            said = kill_owners(SandboxConfig(max_boxes=12, warm_boxes=1), num_owners, Path(folder))
        except subprocess.CalledProcessError:
            return Survey(0, {"owners": num_owners}, {"see stderr": 1})
        # The sweep looks for the socket of a daemon in a directory that it makes.
        files = [path for path in Path(folder).rglob("*") if path != Path(folder, "burnish")]
    left = {"groups": len(said["groups"]), "files": len(files)}
    found = {kind: number for kind, number in left.items() if number}
    return Survey(said["boxes"], {"owners": num_owners}, found)
