"""Control groups of version 2: one tree for all controllers."""

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

from burnish.core.boxes import Limits
from burnish.sandbox.cgroup_files import (
    CPU_PERIOD_US,
    OVERHEAD_PIDS,
    ControlFiles,
    Counters,
    GroupLimits,
    cpu_quota_us,
    disks,
    group_limits,
    remove_directories,
)


class GroupV2:
    """One directory for all controllers."""

    into_directory = True
    slows_writeback = True

    def __init__(
        self, directory: Path, controllers: Iterable[str], *, keep_open: bool = False
    ) -> None:
        """Wrap an existing directory."""
        self._dir = directory
        self._names = frozenset(controllers)
        self._files = ControlFiles(keep_open=keep_open)
        self._applied: dict[str, str] = {}
        self._slowed: tuple[str, ...] = ()
        self._written: GroupLimits | None = None
        self._keeps_peak = False

    @property
    def reusable(self) -> bool:
        """Not where the kernel (5.19 to 6.11) has a peak and cannot reset it."""
        return not self._keeps_peak

    def set_limits(self, limits: Limits) -> None:
        """Write what has changed. Out of memory kills the whole box, never a part of it."""
        wanted = group_limits(limits)
        if wanted != self._written:
            self._written = None
            self._write(limits)
            self._written = wanted
        if "memory" in self._names:
            self._reset_peak()

    def _write(self, limits: Limits) -> None:
        if "memory" in self._names:
            self._set("memory.max", str(limits.memory_bytes))
            self._try_set("memory.swap.max", str(limits.swap_bytes))
            self._try_set("memory.oom.group", "1")
        if "pids" in self._names:
            self._set("pids.max", str(limits.num_pids + OVERHEAD_PIDS))
        if "cpu" in self._names:
            self._set("cpu.max", f"{cpu_quota_us(limits) or 'max'} {CPU_PERIOD_US}")
        if "io" in self._names:
            self._set_rates(limits.read_bytes_per_s or "max", limits.write_bytes_per_s or "max")

    def _reset_peak(self) -> None:
        """What is written resets what this very descriptor reads (since Linux 6.12)."""
        try:
            os.pwrite(self._peak(), b"0", 0)
        except FileNotFoundError:
            return
        except OSError:
            self._keeps_peak = True

    def _set_rates(self, read: int | str, write: int | str) -> None:
        """On all disks: the one that a box writes to is another one each time it starts anew."""
        path = f"{self._dir}/io.max"
        now = () if (read, write) == ("max", "max") else disks()
        for disk in set(self._slowed) - set(now):
            self._files.try_write(path, f"{disk} rbps=max wbps=max")
        for disk in now:
            self._files.write(path, f"{disk} rbps={read} wbps={write}")
        self._slowed = now

    def _set(self, name: str, value: str) -> None:
        if self._applied.get(name) != value:
            self._files.write(f"{self._dir}/{name}", value)
            self._applied[name] = value

    def _try_set(self, name: str, value: str) -> None:
        with contextlib.suppress(OSError):
            self._set(name, value)

    def attach_files(self) -> tuple[str, ...]:
        """The one file."""
        return (f"{self._dir}/cgroup.procs",)

    def entry_fds(self) -> tuple[int, ...]:
        """The directory."""
        return (self._files.descriptor(str(self._dir), os.O_RDONLY | os.O_DIRECTORY),)

    def entered(self) -> None:
        """Thousands of boxes have hardly enough descriptors."""
        self._files.trim()

    def must_join(self, limits: Limits) -> bool:
        """A box is in the one tree from the start."""
        return False

    def join(self, pid: int) -> None:
        """Never needed."""

    def counters(self) -> Counters:
        """`cpu.stat` exists in every group, even without the cpu controller."""
        files, folder = self._files, self._dir
        return Counters(
            files.field(f"{folder}/cpu.stat", b"usage_usec") / 1e6,
            files.field(f"{folder}/memory.events", b"oom_kill") if "memory" in self._names else 0,
            files.field(f"{folder}/pids.events", b"max") if "pids" in self._names else 0,
        )

    def peak_memory_bytes(self) -> int | None:
        """Since the box was made where the kernel (< 6.12) cannot reset it. To be asked once."""
        try:
            return int(os.pread(self._peak(), 64, 0))
        except OSError:
            return None
        finally:
            self._files.trim()

    def _peak(self) -> int:
        try:
            return self._files.descriptor(f"{self._dir}/memory.peak", os.O_RDWR)
        except PermissionError:
            return self._files.descriptor(f"{self._dir}/memory.peak", os.O_RDONLY)

    def held_bytes(self) -> int:
        """Without a memory controller nothing is charged."""
        if "memory" not in self._names:
            return 0
        return int(self._files.read(f"{self._dir}/memory.current"))

    def left(self) -> None:
        """The next box has another disk."""
        self._written = None

    def delete(self) -> bool:
        """Delete the group."""
        return remove_directories([self._dir])

    def remove(self) -> bool:
        """For good."""
        self.close()
        return self.delete()

    def close(self) -> None:
        """Free the descriptors."""
        self._files.close()
