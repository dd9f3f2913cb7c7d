"""What a box uses: counted by its control groups, sampled from /proc where there are none."""

import os
import time
from typing import NamedTuple

from burnish.core.boxes import Limits
from burnish.sandbox.cgroup_files import BoxGroup, Counters
from burnish.sandbox.native.init import Init
from burnish.sandbox.outcome import Cause
from burnish.sandbox.proctree import Process, TreeUsage, read_processes, tree_usage

TICK_S = 0.02
_SLOW_TICK_S = 0.2
_CENSUS_AGE_S = TICK_S / 2
_NOTHING = Counters(0.0, 0, 0)
# Asking takes 28 us, and a command may ask every 20 ms.
_NUM_PROCESSORS = os.cpu_count() or 1


class Census:
    """All processes of this machine, read at most every 10 ms whoever asks."""

    def __init__(self, *, in_memory: bool) -> None:
        """Read nothing yet; `in_memory`: that is where boxes write."""
        self._in_memory = in_memory
        self._at_s = -1.0
        self._processes: list[Process] = []

    def since(self, begun_s: float, init: Init) -> TreeUsage | None:
        """As `below`; None if the last look was before: what it saw may have ended since."""
        now_s = time.monotonic()
        if begun_s > self._at_s and now_s - self._at_s < _CENSUS_AGE_S:
            return None
        return self.below(init)

    def below(self, init: Init) -> TreeUsage:
        """Totals of what runs in a box, and of what it stores in memory."""
        now_s = time.monotonic()
        if now_s - self._at_s >= _CENSUS_AGE_S:
            self._processes, self._at_s = read_processes(), now_s
        usage = tree_usage(self._processes, init.pid)
        if not self._in_memory:
            return usage
        room = init.room()
        stored = (room.f_blocks - room.f_bfree) * room.f_frsize
        return usage._replace(memory_bytes=usage.memory_bytes + stored)


class Totals(NamedTuple):
    """Of one command."""

    cpu_s: float
    peak_memory_bytes: int | None
    oom_kills: int
    pids_refused: int


class Gauge:
    """Measures one box, command after command."""

    def __init__(self, group: BoxGroup | None, census: Census | None) -> None:
        """`census` where the group does not count memory and processes."""
        self._group = group
        self._census = census
        self._limits = Limits()
        self._before = _NOTHING
        self._known = False
        self._begun_s = 0.0
        self._cpu_sampled_s = 0.0
        self._refused = 0
        self._peak = 0

    def begin(self, limits: Limits, init: Init, *, busy: bool) -> None:
        """A command starts; `busy` if something has been running since the last one."""
        self._limits = limits
        self._begun_s = time.monotonic()
        self._refused = self._peak = 0
        self._cpu_sampled_s = 0.0
        if self._group is not None and (busy or not self._known):
            self._before, self._known = self._group.counters(), True
        elif self._census is not None and busy:
            self._cpu_sampled_s = self._census.below(init).cpu_s

    @property
    def first_look_s(self) -> float:
        """From when on a command may be over a limit that the kernel does not enforce by itself."""
        return TICK_S if self._census is None else 0.0

    def over_limit(self, init: Init) -> tuple[Cause | None, float]:
        """Which limit is exceeded, and in how many seconds to look again."""
        pause_s = _SLOW_TICK_S
        if self._group is not None:
            now = self._group.counters()
            if now.oom_kills > self._before.oom_kills:
                return Cause.MEMORY, TICK_S
            if now.cpu_s is not None and self._before.cpu_s is not None:
                left_s = self._limits.cpu_s - (now.cpu_s - self._before.cpu_s)
                if left_s < 0:
                    return Cause.CPU, TICK_S
                pause_s = min(pause_s, left_s / _NUM_PROCESSORS)
        if self._census is None:
            return None, max(TICK_S, pause_s)
        usage = self._census.since(self._begun_s, init)
        if usage is None:
            return None, _CENSUS_AGE_S
        return self._over_sampled(usage), TICK_S

    def _over_sampled(self, usage: TreeUsage) -> Cause | None:
        limits = self._limits
        self._peak = max(self._peak, usage.memory_bytes)
        self._refused += usage.num_tasks >= limits.num_pids
        if usage.memory_bytes > limits.memory_bytes:
            return Cause.MEMORY
        if usage.cpu_s - self._cpu_sampled_s > limits.cpu_s:
            return Cause.CPU
        return Cause.PIDS if usage.num_tasks > limits.num_pids else None

    def finish(self, cpu_s: float, max_rss_bytes: int) -> Totals:
        """Totals of the command that has ended; `cpu_s` and resident set as its init saw them."""
        if self._group is None:
            return Totals(cpu_s, max(self._peak, max_rss_bytes) or None, 0, self._refused)
        before = self._before
        try:
            self._before = now = self._group.counters()
            peak = self._group.peak_memory_bytes()
        except OSError:
            # The pool was closed under us and the groups are gone.
            return Totals(cpu_s, max_rss_bytes or None, 0, 0)
        if now.cpu_s is not None and before.cpu_s is not None:
            cpu_s = max(cpu_s, now.cpu_s - before.cpu_s)
        return Totals(
            cpu_s,
            peak if peak is not None else max(self._peak, max_rss_bytes) or None,
            now.oom_kills - before.oom_kills,
            now.pids_refused - before.pids_refused + self._refused,
        )
