"""The root of a box, built by its first process in the box's own namespaces."""

from __future__ import annotations

import os
import stat
from typing import NamedTuple, Sequence

from . import kernel
from .stage import Stage, make_directories, make_point

# What shows the host, the kernel's switches or other users' keys; the same as the C helper's.
_COVERED_FILES = ("kcore", "keys", "key-users", "kallsyms", "timer_list", "sysrq-trigger")
_COVERED_STATISTICS = ("interrupts", "sched_debug", "latency_stats")
_COVERED_FOLDERS = ("scsi", "acpi", "asound")
_READ_ONLY = ("sys", "bus", "fs", "irq")


class _Parts(NamedTuple):
    """Mounts that were opened while the stage was in sight."""

    devices: int
    shm: int
    binds: list[int]
    empties: list[int]
    """One for each covered directory."""
    nested: dict[str, int]
    """Those of a stage inside the box, for boxes of a template."""


def build_root(
    stage: Stage, layers: Sequence[str], shm_bytes: int, nested: str | None = None
) -> None:
    """Replace this process' file system by the box's.

    Args:
        stage: what to build from.
        layers: where the layers are attached, the writable one first, then the topmost.
        shm_bytes: size of /dev/shm; 0: within the writable layer.
        nested: where a stage like this one is laid out, for a template.

    Everything but the overlay is attached after the old root is gone: a link that hostile code left
    in a layer then leads no further than the box.
    """
    base = stage.base
    kernel.call("mount", None, b"/", None, kernel.MS_PRIVATE_ALL, None)
    parts = _open_parts(stage, layers[0], shm_bytes, nested is not None)
    lower = [f"{layer}/u" for layer in layers[1:]]
    lower += [f"{base}/skel"] + ([f"{base}/image"] if stage.has_image else [])
    options = f"lowerdir={':'.join(lower)},upperdir={layers[0]}/u,workdir={layers[0]}/w,userxattr"
    kernel.mount("overlay", f"{base}/m", "overlay", kernel.NO_SETUID | kernel.NO_DEVICES, options)
    # The kernel wants another proc in sight when a user namespace mounts one: before the pivot.
    proc = _new_proc()
    if nested is not None:
        parts.nested["proc"] = _new_proc()
    kernel.enter_root(f"{base}/m")
    for tree, path in zip(parts.binds, stage.bind_targets):
        _attach(tree, path)
    _attach(proc, "/proc")
    _attach(parts.devices, "/dev")
    _attach(parts.shm, "/dev/shm")
    options = "newinstance,ptmxmode=0666,mode=0600,max=64"
    kernel.mount("devpts", "/dev/pts", "devpts", kernel.NO_SETUID | kernel.NO_EXEC, options)
    _mask_proc(parts.empties)
    if nested is not None:
        _lay_out(nested, parts.nested)


def _new_proc() -> int:
    return kernel.new_tree("proc", kernel.NO_SETUID | kernel.NO_DEVICES | kernel.NO_EXEC)


def _lay_out(base: str, trees: dict[str, int]) -> None:
    os.mkdir(base, 0o755)
    make_directories(base)
    for name, tree in trees.items():
        path = f"{base}/{name}"
        if not os.path.exists(path):
            make_point(path, stat.S_ISDIR(os.fstat(tree).st_mode))
        _attach(tree, path)


def _open_parts(stage: Stage, upper: str, shm_bytes: int, nested: bool) -> _Parts:
    base = stage.base
    flags = kernel.NO_SETUID | kernel.NO_DEVICES
    if shm_bytes:
        shm = kernel.new_tree("tmpfs", flags, size=shm_bytes, mode="1777")
    else:
        shm = kernel.copy_tree(f"{upper}/s", recursive=False)
    names = ["skel", "dev", "empty"] + (["image"] if stage.has_image else [])
    names += [f"b{number}" for number in range(len(stage.bind_targets))]
    return _Parts(
        kernel.copy_tree(f"{base}/dev"),
        shm,
        [kernel.copy_tree(f"{base}/b{number}") for number in range(len(stage.bind_targets))],
        [kernel.copy_tree(f"{base}/empty") for _ in _COVERED_FOLDERS],
        {name: kernel.copy_tree(f"{base}/{name}") for name in names} if nested else {},
    )


def _attach(tree: int, path: str) -> None:
    try:
        kernel.attach(tree, path)
    except OSError as error:
        message = f"mount on {path}: {os.strerror(error.errno or 0)}"
        raise OSError(error.errno, message) from error
    os.close(tree)


def _mask_proc(empties: list[int]) -> None:
    for name in (*_COVERED_FILES, *_COVERED_STATISTICS):
        if os.path.exists(f"/proc/{name}"):
            _attach(kernel.copy_tree("/dev/null", recursive=False), f"/proc/{name}")
    for tree, name in zip(empties, _COVERED_FOLDERS):
        if os.path.exists(f"/proc/{name}"):
            _attach(tree, f"/proc/{name}")
    for name in _READ_ONLY:
        if os.path.exists(f"/proc/{name}"):
            tree = kernel.copy_tree(f"/proc/{name}", recursive=False)
            kernel.set_tree(tree, kernel.READ_ONLY)
            _attach(tree, f"/proc/{name}")
