"""The control groups of this host as a runtime may see them.

Limits are ours (`cgroup.py`), on all runtimes alike. What a runtime does with control groups by
itself is kept out of the way: crun is told to leave them alone, and refuses hosts that mix both
versions even so; runc makes a group in every tree that it finds.
"""

import contextlib
import os
from pathlib import Path
from typing import NamedTuple

from burnish.sandbox.cgroup import Controllers, find_controllers, owner_name, sweep
from burnish.sandbox.keeper.namespace import bind, mount_cgroup2, mount_tmpfs
from burnish.sandbox.oci.runtime import RuntimeName

CGROUPS = Path("/sys/fs/cgroup")


class Groups(NamedTuple):
    """What boxes get."""

    controllers: Controllers | None
    """For our limits."""
    runtime_path: str | None
    """Where in the hierarchy of the runtime it makes its own groups, if it insists."""


def settle(
    base: Path, runtime: RuntimeName, *, privileged: bool, use_control_groups: bool
) -> Groups:
    """Find ours, and show the runtime no more than it can stand.

    Args:
        base: directory of the keeper, in whose mount namespace we are.
        runtime: which one.
        privileged: we are root outside any namespace of ours.
        use_control_groups: whether to have limits by them.
    """
    ours = base / "cgroup"
    ours.mkdir()
    with contextlib.suppress(OSError):
        bind(str(CGROUPS), str(ours))
    controllers = _controllers(str(ours)) if use_control_groups else None
    if runtime in (RuntimeName.CRUN, RuntimeName.PODMAN) and (CGROUPS / "unified").is_dir():
        with contextlib.suppress(OSError):
            mount_tmpfs(str(CGROUPS / "unified"), size_bytes=4096, mode=0o755)
    if runtime is not RuntimeName.RUNC or not privileged:
        return Groups(controllers, None)
    # One group for each container instead of one in each of a dozen trees.
    with contextlib.suppress(OSError):
        mount_cgroup2(str(CGROUPS))
    sweep(CGROUPS)
    return Groups(controllers, f"/{owner_name()}")


def remove_group(runtime_path: str) -> None:
    """Remove an empty group that a runtime made, in every tree where it is."""
    trees = [CGROUPS, *(path for path in CGROUPS.iterdir() if path.is_dir())]
    for tree in trees:
        with contextlib.suppress(OSError):
            os.rmdir(f"{tree}{runtime_path}")


def _controllers(below: str) -> Controllers | None:
    """Through our own view of the trees, which stays when the runtime's is covered."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines()
        return find_controllers(
            Path("/proc/self/cgroup").read_text(encoding="ascii"),
            "\n".join(line for line in lines if line.split()[4].startswith(below)),
            owner_name(),
            rates=True,
        )
    return None
