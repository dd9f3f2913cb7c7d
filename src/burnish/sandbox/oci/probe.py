"""What `burnish doctor` says about OCI runtimes and engines: found by running a box on each one."""

import asyncio
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from burnish.core.boxes import SandboxPool
from burnish.core.checks import Check
from burnish.core.errors import ClassifiedFailure, UserError, one_line
from burnish.sandbox.config import Backend, SandboxConfig
from burnish.sandbox.engine.client import find_docker
from burnish.sandbox.oci.runtime import RuntimeName, find_runtime
from burnish.sandbox.start import open_pool

_BACKENDS: dict[RuntimeName, Backend] = {
    RuntimeName.CRUN: "crun",
    RuntimeName.RUNC: "runc",
    RuntimeName.RUNSC: "gvisor",
    RuntimeName.PODMAN: "podman",
}


def probe_runtimes() -> list[Check]:
    """One row for each runtime and engine, all tried at once. Never raises for what the host lacks.

    One that gets stuck is a failed row after a minute; one that works takes half a second, docker
    five.
    """
    tries: list[Callable[[], Check]] = [
        *(functools.partial(_probe_runtime, name) for name in RuntimeName),
        _probe_docker,
    ]
    with ThreadPoolExecutor(max_workers=len(tries)) as workers:
        return list(workers.map(lambda probe: probe(), tries))


def _probe_runtime(name: RuntimeName) -> Check:
    backend = _BACKENDS[name]
    title = backend if backend in ("gvisor", "podman") else f"oci-{backend}"

    def start() -> tuple[SandboxPool, str]:
        runtime = find_runtime(name)
        return _open(backend), f"{runtime.path} {runtime.version}"

    return _probe(title, start, "run `python -m burnish.sandbox.oci.keeper` to see why")


def _probe_docker() -> Check:
    def start() -> tuple[SandboxPool, str]:
        path = find_docker().path
        return _open("docker"), path

    return _probe("docker", start, "see what `docker info` says")


def _open(backend: Backend) -> SandboxPool:
    """As runs do, with images and a network: what is said here holds for their boxes."""
    return open_pool(SandboxConfig(backend=backend, max_boxes=1))


def _probe(backend: str, start: Callable[[], tuple[SandboxPool, str]], fix: str) -> Check:
    title = f"sandbox {backend}"
    try:
        pool, what = start()
    except UserError as error:
        return Check(name=title, ok=False, detail=error.what, fix=error.fix)
    except ClassifiedFailure as error:
        return Check(name=title, ok=False, detail=one_line(error), fix=fix)
    notes = "; ".join(pool.capabilities.notes)
    asyncio.run(pool.close())
    return Check(name=title, ok=True, detail=f"{what}; {notes}")
