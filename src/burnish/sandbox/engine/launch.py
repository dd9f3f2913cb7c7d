"""One container of docker that has everything but its command."""

import contextlib
import os
import socket
from pathlib import Path

from burnish.sandbox.engine.client import Docker
from burnish.sandbox.engine.counting import ContainerCounts, find_counts
from burnish.sandbox.keeper.children import end_child
from burnish.sandbox.oci.launch import (
    ENGINE_GRACE_S,
    OciLaunch,
    Plan,
    dead_within,
    has_ended,
    unix_listener,
)
from burnish.sandbox.oci.launcher import SOCKET

_LOST = -9
"""As if the monitor had been killed: the daemon does not say how the program ended."""


class DockerLaunch(OciLaunch):
    """As with a runtime, but everything is asked of the daemon, also to kill.

    Its processes are nobody's children here, and their numbers may be another machine's.
    """

    def __init__(self, docker: Docker, name: str, plan: Plan, bundle: Path) -> None:
        """Start it.

        Args:
            docker: the command.
            name: of the container.
            plan: how to start it.
            bundle: an absent directory.

        Raises:
            OSError: it could not be started.
        """
        self._docker = docker
        self._name = name
        self.counts = ContainerCounts({})
        super().__init__(plan, bundle)

    async def _on_ready(self) -> None:
        found = await self._docker.process_1(self._name)
        if found is not None:
            self.counts = find_counts(*found)

    @property
    def ready(self) -> bool:
        """Whether it waits for its command."""
        return self._marked.ready

    async def set_limits(self, options: list[str]) -> None:
        """Give the container that waits other limits.

        Raises:
            OSError: the daemon refused.
        """
        await self._docker.ask("update", *options, self._name)

    def listen(self, port: int) -> socket.socket | None:
        """See `Launched`."""
        if not self._marked.ready:
            return None
        return unix_listener(self.bundle / "net" / SOCKET)

    async def end(self) -> tuple[int, float]:
        """Kill what is left; nothing of the box lives afterwards."""
        self.stdout.drain()
        self.stderr.drain()
        self.counts.counters()
        if not self._marked.ready:
            # Without its command the launcher ends by itself.
            self._hang_up()
            await dead_within(os.pidfd_open(self.monitor_pid), ENGINE_GRACE_S)
        elif not has_ended(self.monitor_pid):
            with contextlib.suppress(OSError):  # it ended meanwhile, or `remove` will say it
                await self._docker.ask("kill", self._name)
            await dead_within(os.pidfd_open(self.monitor_pid), ENGINE_GRACE_S)
        ended = await end_child(self.monitor_pid)
        assert ended is not None, "somebody else reaped the monitor"
        self._plan.helpers.discard(self.monitor_pid)
        state = await self._docker.state(self._name)
        with contextlib.suppress(OSError):  # the guard tries again
            await self._docker.remove(self._name)
        if state is None:
            return (_LOST if self._marked.ready else ended.wait_code), 0.0
        if state.oom_killed:
            self.counts.oom_killed()
        return state.exit_code, 0.0
