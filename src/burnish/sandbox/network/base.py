"""The seam between boxes and whoever provides their networks."""

import socket
from collections.abc import Awaitable, Callable
from typing import Protocol

from burnish.core.boxes import Policy

Listen = Callable[[int], Awaitable[socket.socket]]
"""Makes a socket that gets what a box sends to 127.0.0.1:PORT."""
PROXY_PORT = 3128
"""Port inside of boxes; fixed, so that the environment of a box never changes."""


class Attachment(Protocol):
    """The network of one box."""

    @property
    def env(self) -> dict[str, str]:
        """Variables that make programs use it."""
        ...

    async def set_allow(self, allow: tuple[str, ...]) -> None:
        """Replace the list; connections that it no longer allows are cut before this returns.

        Raises:
            UserError: an entry is malformed; nothing was changed.
        """
        ...

    async def restore(self, listen: Listen) -> None:
        """Go on after the box got a new network."""
        ...

    async def close(self) -> None:
        """Cut everything."""
        ...


class NetworkProvider(Protocol):
    """Who gives boxes the network of their policy."""

    def check(self, allow: tuple[str, ...]) -> None:
        """Refuse a list that could not be carried out.

        Raises:
            UserError: names the entry.
        """
        ...

    async def attach(self, listen: Listen, policy: Policy, box_id: str) -> Attachment:
        """Give a box its network."""
        ...

    async def close(self) -> None:
        """Cut all boxes. May be called again."""
        ...
