"""What `burnish doctor` says about the sandbox: found by really running boxes."""

import asyncio
from typing import Literal, NamedTuple

from burnish.core.boxes import Capabilities, ExecResult, ExecStatus, Feature, SandboxPool
from burnish.core.checks import Check, Importance
from burnish.core.errors import ClassifiedFailure, UserError, one_line
from burnish.sandbox.bubblewrap.inspection import find_bwrap
from burnish.sandbox.config import SandboxConfig
from burnish.sandbox.determinism import determinism, summary
from burnish.sandbox.interpreter import PYTHON_FIX, find_python, python_argv
from burnish.sandbox.native.binary import helper_problem
from burnish.sandbox.native.disk_storage import DEFAULT_DIRECTORY, open_uppers
from burnish.sandbox.native.pool import NativePool
from burnish.sandbox.native.room import Bound, memory_bound, this_host
from burnish.sandbox.oci.probe import probe_runtimes
from burnish.sandbox.session.criu import criu_probe
from burnish.sandbox.start import open_pool

_HELPER_FIX = "sudo apt-get install gcc libc6-dev, then install Burnish again"


class Probe(NamedTuple):
    """What a host can do."""

    capabilities: Capabilities | None
    """Of the backend that `auto` takes; None if no box runs here."""
    checks: tuple[Check, ...]
    """One per thing that was tried, what is needed first."""


def probe() -> Probe:
    """Try everything once, in some seconds. Never raises for what the host lacks."""
    native, native_check = _try("native")
    bwrap, bwrap_check = _try_bubblewrap()
    checks: list[Check] = []
    best = native or bwrap
    if best is None:
        checks += [native_check, bwrap_check]
    else:
        checks.append(_summary(best.capabilities))
        checks.append(_determinism_check(best.capabilities))
        checks.append(_python_check(asyncio.run(_run_python(best))))
        checks.append(native_check if native else _demoted(native_check, Importance.BETTER))
        checks.append(_helper_check())
        if isinstance(native, NativePool):
            checks.append(_room_check(native.room()[0], memory_bound(this_host())))
        checks.append(_demoted(bwrap_check, Importance.OPTIONAL))
    for pool in (native, bwrap):
        if pool is not None:
            asyncio.run(pool.close())
    checks += [_demoted(check, Importance.OPTIONAL) for check in probe_runtimes()]
    checks += [_disk_check(), _criu_check()]
    return Probe(None if best is None else best.capabilities, tuple(checks))


def _try(name: Literal["native", "bubblewrap"]) -> tuple[SandboxPool | None, Check]:
    title = f"sandbox {name}"
    try:
        pool = open_pool(SandboxConfig(backend=name, max_boxes=1))
    except UserError as error:
        return None, Check(name=title, ok=False, detail=error.what, fix=error.fix)
    except ClassifiedFailure as error:
        fix = "burnish --debug doctor shows why"
        return None, Check(name=title, ok=False, detail=one_line(error), fix=fix)
    notes = "; ".join(pool.capabilities.notes)
    return pool, Check(name=title, ok=True, detail=f"runs boxes; {notes}")


def _try_bubblewrap() -> tuple[SandboxPool | None, Check]:
    try:
        find_bwrap()
    except UserError as error:
        return None, Check(name="sandbox bubblewrap", ok=False, detail=error.what, fix=error.fix)
    return _try("bubblewrap")


def _summary(capabilities: Capabilities) -> Check:
    limits = ", ".join(sorted(capabilities.enforces))
    features = ", ".join(sorted(capabilities.features)) or "none"
    detail = f"{capabilities.backend}; limits enforced: {limits}; features: {features}"
    return Check(name="sandbox", ok=True, detail=detail)


def _determinism_check(capabilities: Capabilities) -> Check:
    has_it = Feature.DETERMINISTIC in capabilities.features
    return Check(
        name="sandbox determinism",
        ok=has_it,
        detail=summary(determinism(capabilities)),
        fix="" if has_it else 'sandbox.backend = "native"',
        importance=Importance.OPTIONAL,
    )


def _demoted(check: Check, importance: Importance) -> Check:
    return Check(
        name=check.name, ok=check.ok, detail=check.detail, fix=check.fix, importance=importance
    )


def _helper_check() -> Check:
    problem = helper_problem()
    return Check(
        name="sandbox helper",
        ok=problem is None,
        detail="compiled" if problem is None else f"in Python, boxes start slower: {problem}",
        fix="" if problem is None else _HELPER_FIX,
        importance=Importance.BETTER,
    )


def _disk_check() -> Check:
    name = "sandbox on disk"
    try:
        open_uppers(None).close()
    except UserError as error:
        optional = Importance.OPTIONAL
        return Check(name=name, ok=False, detail=error.what, fix=error.fix, importance=optional)
    return Check(name=name, ok=True, detail=f'storage = "disk" writes to {DEFAULT_DIRECTORY}')


def _room_check(limit: Bound, memory: Bound) -> Check:
    """How many boxes at once; the default of a pool is what runs need."""
    most = max(0, min(limit.most, memory.most))
    default = SandboxConfig()
    tightest = min(limit, memory)
    enough = most >= default.max_boxes + default.warm_boxes
    detail = f"{most} boxes at once: {tightest.what}"
    if tightest is memory:
        detail += f"; {limit.most} by {limit.what}"
    return Check(
        name="sandbox room",
        ok=enough,
        detail=detail,
        fix="" if enough else tightest.fix,
        importance=Importance.BETTER,
    )


def _criu_check() -> Check:
    found = criu_probe()
    return Check(
        name="criu",
        ok=found.usable,
        detail=found.detail,
        fix="" if found.usable else found.fix,
        importance=Importance.OPTIONAL,
    )


async def _run_python(pool: SandboxPool) -> ExecResult:
    async with pool.acquire() as box:
        return await box.exec(python_argv("-c", "import sys; print(sys.version.split()[0])"))


def _python_check(result: ExecResult) -> Check:
    name = "sandbox python"
    if result.status is ExecStatus.OK:
        return Check(name=name, ok=True, detail=f"{find_python()} {result.stdout.decode().strip()}")
    detail = result.message or result.stderr.decode("utf-8", "replace").strip()[-200:]
    fix = PYTHON_FIX if find_python() is None else "reinstall python3"
    return Check(name=name, ok=False, detail=detail or str(result.status), fix=fix)
