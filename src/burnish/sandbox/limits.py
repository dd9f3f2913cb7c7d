"""Which limits and policies are possible, and the kernel's (`setrlimit`) for one command."""

import math
import resource
from collections.abc import Collection
from functools import lru_cache

from burnish.core.boxes import Capabilities, Feature, Limits, Policy, Privileges
from burnish.core.errors import UserError

_DEFAULTS = Limits()
_DEFAULT_POLICY = Policy()

_FLOORS = {
    "wall_s": 0.001,
    "cpu_s": 0.01,
    "memory_bytes": 8 * 2**20,
    "num_pids": 1,
    "disk_bytes": 64 * 2**10,
    "stdout_bytes": 0,
    "num_files": 16,
    "swap_bytes": 0,
    "num_inodes": 64,
    "shm_bytes": 4096,
    "cpus": 0.01,
    "read_bytes_per_s": 4096,
    "write_bytes_per_s": 4096,
}
"""Below these even the launcher could not run, which would look like a broken box."""

_CEILINGS = {
    "wall_s": 10**9,
    "cpu_s": 10**12,
    "memory_bytes": 2**50,
    # PID_MAX_LIMIT, less one for process 1 of the box.
    "num_pids": 2**22 - 1,
    # One file for each 4 KiB are then as many as `num_inodes` may be.
    "disk_bytes": 2**43,
    # Both streams are held in memory, and again in the result: more belongs into a file.
    "stdout_bytes": 2**30,
    "num_files": 2**30,
    "swap_bytes": 2**50,
    # The helpers have 32 bits for it.
    "num_inodes": 2**31,
    "shm_bytes": 2**43,
    # NR_CPUS is 8192 at most.
    "cpus": 8192,
    "read_bytes_per_s": 2**50,
    "write_bytes_per_s": 2**50,
}
"""Above these the kernel, or a message to a helper, has no number for them; or as said."""

_LOCKED_KIB = 64
# What the kernel counts for the user who made a box's user namespace, too: us, on the host.
QUEUED_SIGNALS = 256
# POSIX counts file sizes in these.
_BLOCK_BYTES = 512
# A backstop for what happens between two samples (see `proctree`). It must be wide: a program that
# runs into it sees a failed allocation and exits as it likes, where a sample gives a typed `oom`.
_ADDRESS_SPACE_SLACK_BYTES = 4 * 2**30


@lru_cache(maxsize=256)
def check_limits(limits: Limits) -> None:
    """Refuse limits under which nothing can run, and those that no kernel takes.

    Raises:
        ValueError: names the field, the value and the least or greatest value.
    """
    for name, floor in _FLOORS.items():
        value = getattr(limits, name)
        if value is not None and not (math.isfinite(value) and value >= floor):
            raise ValueError(f"limits.{name} is {value}: it must be at least {floor}")
        if value is not None and value > _CEILINGS[name]:
            raise ValueError(f"limits.{name} is {value}: it may be at most {_CEILINGS[name]}")


@lru_cache(maxsize=256)
def check_enforced(limits: Limits, capabilities: Capabilities) -> None:
    """Refuse a limit that was asked for and would not hold.

    Raises:
        UserError: names the field and the backend.
    """
    for name in Limits.__struct_fields__:
        asked = getattr(limits, name)
        if asked != getattr(_DEFAULTS, name) and name not in capabilities.enforces:
            raise UserError(
                f"the {capabilities.backend} sandbox cannot enforce limits.{name} = {asked} here.",
                fix=f"leave limits.{name} at its default, or see `burnish doctor`",
            )


def group_enforced(controllers: Collection[str], *, writes_to_disk: bool) -> frozenset[str]:
    """Limits that only control groups enforce.

    Args:
        controllers: those that boxes have.
        writes_to_disk: boxes can write to a disk; in memory there is nothing to throttle. They read
            their programs from one in any case.
    """
    enforced = set()
    if "memory" in controllers:
        enforced.add("swap_bytes")
    if "cpu" in controllers:
        enforced.add("cpus")
    if "blkio" in controllers or "io" in controllers:
        enforced.add("read_bytes_per_s")
        if writes_to_disk:
            enforced.add("write_bytes_per_s")
    return frozenset(enforced)


class TooManyBoxes(UserError):
    """More than this host has room for: another backend is no way out."""


def check_policy(image: str | None, policy: Policy, capabilities: Capabilities) -> None:
    """Refuse an image or a policy that the backend does not have.

    Raises:
        UserError: names the part, the backend and what to change.
    """
    if image is None and policy == _DEFAULT_POLICY:
        return
    asked = {
        Feature.IMAGES: (image is not None, "image", "leave the image out"),
        Feature.ALLOW_LIST: (bool(policy.allow), "network allow-list", "set allow = []"),
        Feature.PRIVILEGES: (
            policy.privileges is not Privileges.NONE,
            "privileges",
            'set privileges = "none"',
        ),
        Feature.DETERMINISTIC: (policy.deterministic, "determinism", "set deterministic = false"),
    }
    for feature, (wanted, what, fix) in asked.items():
        if wanted and feature not in capabilities.features:
            raise UserError(
                f"the {capabilities.backend} sandbox has no {what} here, but it was asked for.",
                fix=f"{fix}, or choose another backend (`burnish doctor` lists them)",
            )


def rlimits(
    limits: Limits, *, num_processes: int | None, memory_is_sampled: bool
) -> tuple[tuple[int, int, int], ...]:
    """(resource, soft, hard) for `setrlimit`; never above the hard limits that we have ourselves.

    Args:
        limits: what was asked.
        num_processes: bound on processes of the box's user, where no control group has one.
        memory_is_sampled: no control group bounds the memory.
    """
    cpu_s = max(1, math.ceil(limits.cpu_s))
    locked = _LOCKED_KIB * 2**10
    # The soft limit sends SIGXCPU, which says why; the hard one kills who ignores it.
    wanted = [
        (resource.RLIMIT_FSIZE, limits.disk_bytes, limits.disk_bytes),
        (resource.RLIMIT_NOFILE, limits.num_files, limits.num_files),
        (resource.RLIMIT_MEMLOCK, locked, locked),
        (resource.RLIMIT_CPU, cpu_s, cpu_s + 1),
    ]
    if memory_is_sampled:
        most = limits.memory_bytes + _ADDRESS_SPACE_SLACK_BYTES
        wanted.append((resource.RLIMIT_AS, most, most))
    if num_processes is not None:
        wanted.append((resource.RLIMIT_NPROC, num_processes, num_processes))
    return tuple(_within_ours(*entry) for entry in wanted)


def bound_for_boxes() -> None:
    """Limits of this process that boxes inherit and nobody asks for; as in `fallback/start.py`.

    With a core limit of 1 the kernel writes no core file and does not start what
    `kernel.core_pattern` names, which it does with any other, 0 too.
    """
    for which, most in ((resource.RLIMIT_CORE, 1), (resource.RLIMIT_SIGPENDING, QUEUED_SIGNALS)):
        _, soft, hard = _within_ours(which, most, most)
        resource.setrlimit(which, (soft, hard))


def _within_ours(which: int, soft: int, hard: int) -> tuple[int, int, int]:
    ours = resource.getrlimit(which)[1]
    if ours == resource.RLIM_INFINITY:
        return which, soft, hard
    return which, min(soft, ours), min(hard, ours)


def ulimits(limits: Limits, *, num_processes: int | None, memory_is_sampled: bool) -> list[str]:
    """Shell commands that set the kernel's limits; each fails if its limit cannot be set.

    Args:
        limits: what was asked.
        num_processes: bound on processes of the box's user, where no control group has one.
        memory_is_sampled: no control group bounds the memory.
    """
    cpu_s = max(1, math.ceil(limits.cpu_s))
    wanted = {
        "f": max(1, limits.disk_bytes // _BLOCK_BYTES),
        "n": limits.num_files,
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
