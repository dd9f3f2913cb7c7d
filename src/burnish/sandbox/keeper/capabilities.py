"""What boxes of every keeper can do, and what their host lacks."""

from burnish.sandbox.cgroup import Controllers
from burnish.sandbox.host_view import groups_fix
from burnish.sandbox.limits import group_enforced

_ALWAYS = frozenset(
    {
        "wall_s", "cpu_s", "memory_bytes", "num_pids", "disk_bytes", "stdout_bytes", "num_files",
        "num_inodes", "shm_bytes",
    }
)  # fmt: skip


def enforced(controllers: Controllers | None) -> frozenset[str]:
    """Names of the limits that hold."""
    return _ALWAYS | group_enforced(controllers.bases if controllers else (), writes_to_disk=False)


def group_notes(controllers: Controllers | None) -> list[str]:
    """What is weaker than it could be."""
    if controllers is None:
        return [
            "no writable control groups: memory and CPU are sampled every 20 ms, processes are "
            f"limited by RLIMIT_NPROC; {groups_fix()}"
        ]
    notes = []
    if lacking := [name for name in ("memory", "pids") if name not in controllers.bases]:
        notes.append(f"no {' and '.join(lacking)} control group: sampled every 20 ms instead")
    return notes
