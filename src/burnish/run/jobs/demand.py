"""How many cores a process asks for: what its threads ran, and what they waited for a core.

Waiting counts, so that a busy machine does not make a busy run look idle.
"""

from __future__ import annotations

from pathlib import Path


class Demand:
    """Of one process, between two looks."""

    def __init__(self, pid: int, now_s: float) -> None:
        """Begin to count."""
        self._tasks = Path("/proc") / str(pid) / "task"
        self._before, self._at_s = self._seconds(), now_s

    def since(self, now_s: float) -> float:
        """Cores, on average since the last call; 0.0 of a process that is gone."""
        now, elapsed_s = self._seconds(), max(now_s - self._at_s, 1e-9)
        # What a thread that has ended since had counted is missed.
        used = sum(max(s - self._before.get(task, 0.0), 0.0) for task, s in now.items())
        self._before, self._at_s = now, now_s
        return used / elapsed_s

    def _seconds(self) -> dict[str, float]:
        found = {}
        try:
            for task in self._tasks.iterdir():
                ran, waited, _ = (task / "schedstat").read_text().split()
                found[task.name] = (int(ran) + int(waited)) / 1e9
        except (OSError, ValueError):
            # Threads come and go, and a kernel may keep no such figures.
            return found
        return found
