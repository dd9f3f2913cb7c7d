"""What the sandbox makes of this host, and one box of each native helper that really runs."""

import asyncio
import os
import sys

from burnish.core.boxes import Limits
from burnish.core.errors import UserError
from burnish.sandbox.config import SandboxConfig
from burnish.sandbox.native.binary import helper_problem
from burnish.sandbox.native.pool import NativePool
from burnish.sandbox.probe import probe
from burnish.sandbox.start import open_pool

CODE = "import os; print(os.getuid(), open('/proc/self/cgroup').read())"
write = sys.stdout.write


async def run_box(helper: str) -> None:
    pool = NativePool(SandboxConfig(helper=helper))
    async with pool.acquire() as box:
        result = await box.exec(("python3", "-c", CODE), limits=Limits(wall_s=60, cpu_s=60))
    await pool.close()
    write(f"  {helper}: {result.status} {result.stdout!r} {result.usage}\n")


write(f"  uid {os.getuid()}, compiled helper: {helper_problem() or 'usable'}\n")
for check in probe().checks:
    write(f"  {'ok' if check.ok else 'NO'} {check.name}: {check.detail} {check.fix}\n")
try:
    asyncio.run(open_pool().close())
    asyncio.run(run_box("c"))
    asyncio.run(run_box("python"))
except UserError as error:
    write(f"  refused: {error}\n")
    sys.exit(3)
