"""Control groups of version 1: one tree per controller."""

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

from burnish.core.boxes import Limits
from burnish.sandbox.cgroup_files import (
    OVERHEAD_PIDS,
    ControlFiles,
    Counters,
    GroupLimits,
    cpu_quota_us,
    disks,
    group_limits,
    make_directory,
    remove_directories,
)

_RATES = {
    "read_bytes_per_s": "blkio.throttle.read_bps_device",
    "write_bytes_per_s": "blkio.throttle.write_bps_device",
}


class GroupV1:
    """One directory in each controller's tree.

    Each tree that a process is moved into costs up to 0.04 ms, so those for limits that few ask for
    (`late`) are made and joined when one does.
    """

    into_directory = False
    slows_writeback = False
    reusable = True

    def __init__(
        self,
        directories: Mapping[str, Path],
        late: Mapping[str, Path] | None = None,
        *,
        keep_open: bool = False,
    ) -> None:
        """Wrap existing directories, and names of such as do not exist yet."""
        self._dirs = dict(directories)
        self._late = dict(late or {})
        self._joined = False
        self._files = ControlFiles(keep_open=keep_open)
        self._applied: dict[str, str] = {}
        self._slowed: dict[str, tuple[str, ...]] = {}
        self._written: GroupLimits | None = None
        memory = self._dirs.get("memory")
        self._memory = f"{memory}/memory." if memory else None
        self._has_swap = memory is not None and os.path.exists(
            f"{memory}/memory.memsw.limit_in_bytes"
        )
        self._events = f"{self._dirs['pids']}/pids.events" if "pids" in self._dirs else None
        self._cpu = f"{self._dirs['cpuacct']}/cpuacct.usage" if "cpuacct" in self._dirs else None

    def set_limits(self, limits: Limits) -> None:
        """Write what has changed."""
        wanted = group_limits(limits)
        if wanted != self._written:
            self._written = None
            self._write(limits)
            self._written = wanted
        if self._memory:
            with contextlib.suppress(OSError):
                self._files.rewrite(f"{self._memory}max_usage_in_bytes", "0")

    def _write(self, limits: Limits) -> None:
        if self._memory:
            self._set_memory(limits)
        if pids := self._dirs.get("pids"):
            self._set(f"{pids}/pids.max", str(limits.num_pids + OVERHEAD_PIDS))
        if not self._joined:
            return
        if cpu := self._late.get("cpu"):
            self._set(f"{cpu}/cpu.cfs_quota_us", str(cpu_quota_us(limits) or -1))
        if blkio := self._late.get("blkio"):
            for field, name in _RATES.items():
                self._set_rate(f"{blkio}/{name}", getattr(limits, field))

    def _set_rate(self, path: str, rate: int | None) -> None:
        """On all disks: the one that a box writes to is another one each time it starts anew."""
        now = disks() if rate else ()
        for disk in set(self._slowed.get(path, ())) - set(now):
            self._files.try_write(path, f"{disk} 0")
        for disk in now:
            self._files.write(path, f"{disk} {rate}")
        self._slowed[path] = now

    def _set_memory(self, limits: Limits) -> None:
        """The limit with swap may never be below the one without; the order depends on the old."""
        memory = f"{self._memory}limit_in_bytes"
        both = f"{self._memory}memsw.limit_in_bytes"
        if self._has_swap:
            wanted = [
                (memory, limits.memory_bytes),
                (both, limits.memory_bytes + limits.swap_bytes),
            ]
            try:
                for path, value in wanted:
                    self._set(path, str(value))
            except OSError:
                for path, value in reversed(wanted):
                    self._set(path, str(value))
        else:
            if f"{self._memory}swappiness" not in self._applied:
                self._files.try_write(f"{self._memory}swappiness", "0")
                self._applied[f"{self._memory}swappiness"] = "0"
            self._set(memory, str(limits.memory_bytes))
        self._bound_sockets(limits)

    def _bound_sockets(self, limits: Limits) -> None:
        """What TCP holds, which version 1 counts apart: 470 MiB by one process otherwise.

        Some kernels have no such file. Senders wait at this limit: nothing is killed.
        """
        path, value = f"{self._memory}kmem.tcp.limit_in_bytes", str(limits.memory_bytes)
        if self._applied.get(path) != value:
            self._files.try_write(path, value)
            self._applied[path] = value

    def _set(self, path: str, value: str) -> None:
        if self._applied.get(path) != value:
            self._files.write(path, value)
            self._applied[path] = value

    def attach_files(self) -> tuple[str, ...]:
        """One per tree."""
        return tuple(f"{path}/cgroup.procs" for path in self._dirs.values())

    def entry_fds(self) -> tuple[int, ...]:
        """`cgroup.procs` of each tree that every box is in."""
        return tuple(self._files.descriptor(name, os.O_WRONLY) for name in self.attach_files())

    def entered(self) -> None:
        """Thousands of boxes have hardly enough descriptors."""
        self._files.trim()

    def must_join(self, limits: Limits) -> bool:
        """Processor share and disk rates have trees of their own."""
        asked = (limits.cpus, limits.read_bytes_per_s, limits.write_bytes_per_s)
        return not self._joined and bool(self._late) and any(value is not None for value in asked)

    def join(self, pid: int) -> None:
        """Make the late trees and move the box there."""
        for path in self._late.values():
            make_directory(path)
            # A process that forks while we move is found in the next round.
            for _ in range(100):
                members = self._members() or [pid]
                there = self._files.members(f"{path}/cgroup.procs")
                waiting = [member for member in members if member not in there]
                if not waiting:
                    break
                for member in waiting:
                    with contextlib.suppress(ProcessLookupError):
                        self._files.write(f"{path}/cgroup.procs", str(member))
        self._joined, self._written = True, None

    def _members(self) -> list[int]:
        for path in self.attach_files():
            return self._files.members(path)
        return []

    def counters(self) -> Counters:
        """Read every controller that we have."""
        files = self._files
        return Counters(
            int(files.read(self._cpu)) / 1e9 if self._cpu else None,
            files.field(f"{self._memory}oom_control", b"oom_kill") if self._memory else 0,
            files.field(self._events, b"max") if self._events else 0,
        )

    def peak_memory_bytes(self) -> int | None:
        """Reset by `set_limits`."""
        if self._memory is None:
            return None
        return int(self._files.read(f"{self._memory}max_usage_in_bytes", os.O_RDWR))

    def held_bytes(self) -> int:
        """Without a memory controller nothing is charged."""
        return int(self._files.read(f"{self._memory}usage_in_bytes")) if self._memory else 0

    def left(self) -> None:
        """The next box starts outside of the late trees, without their limits."""
        if self._joined:
            self._joined, self._written = False, None

    def delete(self) -> bool:
        """Try each tree."""
        return remove_directories([*self._dirs.values(), *self._late.values()])

    def remove(self) -> bool:
        """For good."""
        self.close()
        return self.delete()

    def close(self) -> None:
        """Free the descriptors."""
        self._files.close()
