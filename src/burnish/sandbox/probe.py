"""What `burnish doctor` says about the sandbox: found by really running boxes."""

import asyncio
from typing import NamedTuple

from burnish.core.boxes import Capabilities, ExecResult, ExecStatus
from burnish.core.checks import Check
from burnish.core.errors import ClassifiedFailure, UserError, one_line
from burnish.sandbox.bubblewrap.inspection import find_bwrap
from burnish.sandbox.bubblewrap.pool import BubblewrapPool
from burnish.sandbox.config import SandboxConfig
from burnish.sandbox.interpreter import PYTHON_FIX, find_python, python_argv


class Probe(NamedTuple):
    """What a host can do."""

    capabilities: Capabilities | None
    """None if no box runs here."""
    checks: tuple[Check, ...]
    """One per thing that must be there, in the order in which to fix them."""


def probe() -> Probe:
    """Try everything once, in about half a second. Never raises for what the host lacks."""
    try:
        path, features = find_bwrap()
    except UserError as error:
        return Probe(None, (Check(name="bubblewrap", ok=False, detail=error.what, fix=error.fix),))
    checks = [Check(name="bubblewrap", ok=True, detail=f"{path} {features.version}")]
    try:
        pool = BubblewrapPool(SandboxConfig(max_boxes=1))
    except UserError as error:
        checks.append(Check(name="sandbox", ok=False, detail=error.what, fix=error.fix))
        return Probe(None, tuple(checks))
    except ClassifiedFailure as error:
        fix = "run `python -m burnish.sandbox.bubblewrap.keeper` to see why"
        checks.append(Check(name="sandbox", ok=False, detail=one_line(error), fix=fix))
        return Probe(None, tuple(checks))
    capabilities = pool.capabilities
    detail = f"runs boxes; limits enforced: {', '.join(sorted(capabilities.enforces))}"
    checks.append(Check(name="sandbox", ok=True, detail=detail))
    checks.append(Check(name="sandbox limits", ok=True, detail="; ".join(capabilities.notes)))
    checks.append(_python_check(asyncio.run(_run_python(pool))))
    return Probe(capabilities, tuple(checks))


async def _run_python(pool: BubblewrapPool) -> ExecResult:
    try:
        async with pool.acquire() as box:
            return await box.exec(python_argv("-c", "import sys; print(sys.version.split()[0])"))
    finally:
        await pool.close()


def _python_check(result: ExecResult) -> Check:
    name = "sandbox python"
    if result.status is ExecStatus.OK:
        return Check(name=name, ok=True, detail=f"{find_python()} {result.stdout.decode().strip()}")
    detail = result.message or result.stderr.decode("utf-8", "replace").strip()[-200:]
    fix = PYTHON_FIX if find_python() is None else "reinstall python3"
    return Check(name=name, ok=False, detail=detail or str(result.status), fix=fix)
