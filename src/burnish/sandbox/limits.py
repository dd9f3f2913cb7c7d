"""The kernel's limits (`setrlimit`) for one command, as the launcher's shell sets them."""

import math

from burnish.core.boxes import Limits

_FLOORS = {
    "wall_s": 0.001,
    "cpu_s": 0.01,
    "memory_bytes": 8 * 2**20,
    "num_pids": 1,
    "disk_bytes": 64 * 2**10,
    "stdout_bytes": 0,
}
"""Below these even the launcher could not run, which would look like a broken box."""

NUM_FILES = 256
_LOCKED_KIB = 64
# POSIX counts file sizes in these.
_BLOCK_BYTES = 512
# A backstop for what happens between two samples (see `proctree`). It must be wide: a program that
# runs into it sees a failed allocation and exits as it likes, where a sample gives a typed `oom`.
_ADDRESS_SPACE_SLACK_BYTES = 4 * 2**30


def check_limits(limits: Limits) -> None:
    """Refuse limits under which nothing can run.

    Raises:
        ValueError: names the field, the value and the least value.
    """
    for name, floor in _FLOORS.items():
        value = getattr(limits, name)
        if not (math.isfinite(value) and value >= floor):
            raise ValueError(f"limits.{name} is {value}: it must be at least {floor}")


def ulimits(limits: Limits, *, num_processes: int | None, memory_is_sampled: bool) -> list[str]:
    """Shell commands that set the kernel's limits; each fails if its limit cannot be set.

    Args:
        limits: what was asked.
        num_processes: bound on processes of the box's user, where no control group has one.
        memory_is_sampled: no control group bounds the memory.
    """
    cpu_s = max(1, math.ceil(limits.cpu_s))
    wanted = {
        "c": 0,
        "f": max(1, limits.disk_bytes // _BLOCK_BYTES),
        "n": NUM_FILES,
        "l": _LOCKED_KIB,
    }
    if memory_is_sampled:
        wanted["v"] = (limits.memory_bytes + _ADDRESS_SPACE_SLACK_BYTES) // 2**10
    # Where the host's own hard limit is lower, setting ours fails, and then the lower one holds.
    commands = [
        f"{{ ulimit -{flag} {value} 2>/dev/null || ulimit -S -{flag} $(ulimit -H -{flag}); }}"
        for flag, value in wanted.items()
    ]
    # The soft limit sends SIGXCPU, which says why; the hard one kills who ignores it.
    commands.append(
        f"{{ ulimit -S -t {cpu_s} && ulimit -H -t {cpu_s + 1} || ulimit -S -t $(ulimit -H -t); }}"
    )
    if num_processes is not None:
        # dash spells it -p; in bash that is the pipe size, which cannot be set, and -u it is.
        n = num_processes
        commands.append(f"{{ ulimit -p {n} 2>/dev/null || ulimit -u {n}; }}")
    return commands
