"""Try several edits of one state and keep the best: snapshot, fork, rollback.

    python examples/sandbox_branches.py

A box holds a program with a test. Each branch is a fork of the same frozen files, tries its own fix
and runs the test; the branch that passes is carried over. Nothing is copied between branches.
"""

import asyncio
from typing import cast

from burnish.core.boxes import ExecStatus, Feature, Limits, StatefulSandbox
from burnish.core.errors import UserError
from burnish.sandbox.config import SandboxConfig
from burnish.sandbox.interpreter import python_argv
from burnish.sandbox.start import open_pool

PROGRAM = b"def median(values):\n    return sorted(values)[len(values) // 2]\n"
TEST = b"""
import sys
sys.path.insert(0, "/work")
from program import median
assert median([3, 1, 2]) == 2
assert median([4, 1, 2, 3]) == 2.5
"""
FIXES = {
    "round down": b"def median(v):\n    return sorted(v)[(len(v) - 1) // 2]\n",
    "mean of the middle": (
        b"def median(v):\n    v = sorted(v); n = len(v)\n"
        b"    return (v[(n - 1) // 2] + v[n // 2]) / 2\n"
    ),
    "never ends": b"while True: pass\n",
}


async def passes(box: StatefulSandbox, program: bytes) -> bool:
    """Whether the test accepts the program."""
    await box.write_file("program.py", program)
    result = await box.exec(python_argv("/work/test.py"), limits=Limits(wall_s=2))
    return result.status is ExecStatus.OK


async def main() -> None:
    """Find the fix."""
    pool = open_pool(SandboxConfig(max_boxes=len(FIXES) + 1))
    if Feature.SNAPSHOTS not in pool.capabilities.features:
        raise UserError(
            f"the {pool.capabilities.backend} sandbox has no snapshots.",
            fix="burnish doctor says why the native one does not run",
        )
    try:
        async with pool.acquire() as acquired:
            box = cast(StatefulSandbox, acquired)
            await box.write_file("test.py", TEST)
            print("original passes:", await passes(box, PROGRAM))
            start = await box.snapshot()
            async with box.fork(len(FIXES), start) as branches:
                results = await asyncio.gather(*map(passes, branches, FIXES.values()))
            for name, passed in zip(FIXES, results, strict=True):
                print(f"{name}: {'passes' if passed else 'fails'}")
            winner = FIXES[list(FIXES)[results.index(True)]]
            await box.rollback(start)
            print("winner passes:", await passes(box, winner))
    finally:
        await pool.close()


if __name__ == "__main__":
    asyncio.run(main())
