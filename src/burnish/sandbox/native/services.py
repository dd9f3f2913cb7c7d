"""What all boxes of a pool use, and the seam to whoever provides their networks."""

import socket
from collections.abc import Awaitable, Callable
from typing import NamedTuple, Protocol

from burnish.core.boxes import Capabilities, Policy


class Attachment(Protocol):
    """The network of one box."""

    @property
    def env(self) -> dict[str, str]:
        """Variables that make programs use it."""
        ...

    async def restore(self, listen: Callable[[int], Awaitable[socket.socket]]) -> None:
        """Go on after the box got a new network."""
        ...

    async def close(self) -> None:
        """Cut everything."""
        ...


class NetworkProvider(Protocol):
    """Who gives boxes the network of their policy."""

    async def attach(
        self, listen: Callable[[int], Awaitable[socket.socket]], policy: Policy, box_id: str
    ) -> Attachment:
        """Give a box its network."""
        ...


class Services(NamedTuple):
    """What all boxes of a pool use."""

    capabilities: Capabilities
    null_fd: int
    sampled: bool
    """Some limit is not counted by control groups."""
    counts_pids: bool
    """Control groups bound processes."""
    counts_memory: bool
    """Control groups bound memory."""
    network: NetworkProvider | None
    observe_exec: Callable[[float], None]
