"""What the control groups of a container counted, as far as this machine shows them.

The engine makes them and removes them with the container, so the last numbers are kept.
"""

import contextlib
from pathlib import Path

from burnish.sandbox.cgroup_files import ControlFiles, Counters

_CGROUPS = Path("/sys/fs/cgroup")


class ContainerCounts:
    """Of one container."""

    def __init__(self, groups: dict[str, Path]) -> None:
        """Start at nothing.

        Args:
            groups: by controller of version 1, or `""` for the one group of version 2.
        """
        self._groups = groups
        self._files = ControlFiles(keep_open=False)
        self._last = Counters(None, 0, 0)
        self._peak: int | None = None
        self._oom_kills = 0

    @property
    def counts_cpu(self) -> bool:
        """Whether CPU time over all processes is known while the container runs."""
        return bool(self._groups.keys() & {"", "cpuacct"})

    def oom_killed(self) -> None:
        """The engine says so."""
        self._oom_kills = 1

    def counters(self) -> Counters:
        """The last totals that were seen."""
        with contextlib.suppress(OSError, ValueError):
            self._last = self._read()
        return self._last._replace(oom_kills=max(self._last.oom_kills, self._oom_kills))

    def peak_memory_bytes(self) -> int | None:
        """The highest usage that was seen."""
        return self._peak

    def _read(self) -> Counters:
        read = self._files
        if (group := self._groups.get("")) is not None:
            with contextlib.suppress(FileNotFoundError):  # Linux 5.19 and newer
                self._peak = int(read.read(f"{group}/memory.peak"))
            return Counters(
                read.field(f"{group}/cpu.stat", b"usage_usec") / 1e6,
                read.field(f"{group}/memory.events", b"oom_kill"),
                read.field(f"{group}/pids.events", b"max"),
            )
        cpu_s = self._last.cpu_s
        if (cpu := self._groups.get("cpuacct")) is not None:
            cpu_s = int(read.read(f"{cpu}/cpuacct.usage")) / 1e9
        kills = refused = 0
        if (memory := self._groups.get("memory")) is not None:
            kills = read.field(f"{memory}/memory.oom_control", b"oom_kill")
            self._peak = int(read.read(f"{memory}/memory.max_usage_in_bytes"))
        if (pids := self._groups.get("pids")) is not None:
            refused = read.field(f"{pids}/pids.events", b"max")
        return Counters(cpu_s, kills, refused)


def find_counts(container_id: str, pid: int, proc: Path = Path("/proc")) -> ContainerCounts:
    """The groups of a container; nothing counts if this is not the daemon's machine.

    Args:
        container_id: all 64 digits: a group that has them in its name is no other's.
        pid: of process 1, in the daemon's eyes.
        proc: `/proc`.
    """
    groups = {}
    with contextlib.suppress(OSError, UnicodeDecodeError):
        for line in (proc / str(pid) / "cgroup").read_text(encoding="utf-8").splitlines():
            _, names, path = line.split(":", 2)
            for name in names.split(",") if container_id in path else ():
                for place in (_CGROUPS / name, _CGROUPS):
                    group = Path(f"{place}{path}")
                    if group.is_dir():
                        groups[name] = group
                        break
    if "" in groups and not (groups[""] / "memory.events").exists():
        del groups[""]  # of a machine that mixes both versions
    return ContainerCounts(groups)
