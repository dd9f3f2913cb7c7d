"""What `burnish doctor` says about OCI runtimes: found by running a box on each one."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

from burnish.core.checks import Check
from burnish.core.errors import ClassifiedFailure, UserError, one_line
from burnish.sandbox.config import SandboxConfig
from burnish.sandbox.oci.pool import OciPool
from burnish.sandbox.oci.runtime import RuntimeName, find_runtime


def probe_runtimes() -> list[Check]:
    """One row for each runtime, all tried at once. Never raises for what the host lacks.

    A runtime that gets stuck is a failed row after ten seconds; one that works takes half a second.
    """
    with ThreadPoolExecutor(max_workers=len(RuntimeName)) as workers:
        return list(workers.map(_probe, RuntimeName))


def _probe(name: RuntimeName) -> Check:
    title = f"sandbox {'gvisor' if name is RuntimeName.RUNSC else f'oci-{name}'}"
    try:
        runtime = find_runtime(name)
        pool = OciPool(SandboxConfig(max_boxes=1), name)
    except UserError as error:
        return Check(name=title, ok=False, detail=error.what, fix=error.fix)
    except ClassifiedFailure as error:
        fix = "run `python -m burnish.sandbox.oci.keeper` to see why"
        return Check(name=title, ok=False, detail=one_line(error), fix=fix)
    notes = "; ".join(pool.capabilities.notes)
    asyncio.run(pool.close())
    return Check(name=title, ok=True, detail=f"{runtime.path} {runtime.version}; {notes}")
