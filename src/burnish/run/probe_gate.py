"""The first samples of a probe go ahead; the others follow when one of them came through.

A group behind a half-open breaker mostly fails like the ones before it. Sixteen samples would all
be lost to learn what two can tell.
"""

from __future__ import annotations

import asyncio


class _Probe:
    """One group."""

    def __init__(self, num_first: int, size: int) -> None:
        self.num_first, self.size = num_first, size
        self.num_ended = 0
        self.opened = asyncio.Event()


class ProbeGate:
    """Holds samples back. One event loop, no locks."""

    def __init__(self) -> None:
        """Nobody waits."""
        self._probes: dict[str, _Probe] = {}

    def starts(self, group_id: str, num_first: int, size: int) -> int:
        """A probe of `size` samples starts; how many of them go ahead."""
        num_first = min(num_first, size)
        self._probes[group_id] = _Probe(num_first, size)
        return num_first

    async def wait(self, group_id: str, sample: int) -> None:
        """Until this sample may start: at once, unless it is one of a probe that is held back."""
        probe = self._probes.get(group_id)
        if probe is not None and sample >= probe.num_first:
            await probe.opened.wait()

    def ended(self, group_id: str, *, well: bool) -> int:
        """The last attempt of a sample ended; how many samples may start because of that."""
        probe = self._probes.get(group_id)
        if probe is None or probe.opened.is_set():
            return 0
        probe.num_ended += 1
        # If all failed and nobody gave the group up, the others may try.
        if not well and probe.num_ended < probe.num_first:
            return 0
        probe.opened.set()
        return probe.size - probe.num_first

    def gone(self, group_id: str) -> None:
        """The group is complete, or was given up."""
        probe = self._probes.pop(group_id, None)
        if probe is not None:
            probe.opened.set()
