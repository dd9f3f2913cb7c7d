"""The kernel's resource limits (`setrlimit`) for one command, within those of the host."""

import math
import resource

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
_LOCKED_BYTES = 64 * 2**10
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


def rlimits(limits: Limits, *, memory_is_sampled: bool) -> list[tuple[int, int, int]]:
    """(resource, soft, hard) for bubblewrap and all that it starts."""
    cpu_s = max(1, math.ceil(limits.cpu_s))
    wanted = [
        (resource.RLIMIT_CORE, 0, 0),
        (resource.RLIMIT_CPU, cpu_s, cpu_s + 1),
        (resource.RLIMIT_FSIZE, limits.disk_bytes, limits.disk_bytes),
        (resource.RLIMIT_NOFILE, NUM_FILES, NUM_FILES),
        (resource.RLIMIT_MEMLOCK, _LOCKED_BYTES, _LOCKED_BYTES),
        (resource.RLIMIT_RTPRIO, 0, 0),
        (resource.RLIMIT_NICE, 0, 0),
    ]
    if memory_is_sampled:
        backstop = limits.memory_bytes + _ADDRESS_SPACE_SLACK_BYTES
        wanted.append((resource.RLIMIT_AS, backstop, backstop))
    return [_within_hard(*entry) for entry in wanted]


def _within_hard(which: int, soft: int, hard: int) -> tuple[int, int, int]:
    """Without privilege a hard limit can only fall."""
    _, ceiling = resource.getrlimit(which)
    if ceiling == resource.RLIM_INFINITY:
        return which, soft, hard
    return which, min(soft, ceiling), min(hard, ceiling)
