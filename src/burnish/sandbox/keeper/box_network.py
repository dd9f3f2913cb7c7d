"""The allow-listed network of a box whose every command has a network namespace of its own.

    keeper: socket in the namespace of the command that waits --> here --> NetworkProvider

What the program sends before somebody accepts waits in the socket. When the command is over all is
cut: an open socket would keep the namespace, and a connection the traffic, alive.
"""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from burnish.core.boxes import Policy
from burnish.sandbox.keeper.client import failure
from burnish.sandbox.network.base import Attachment, NetworkProvider


class BoxNetwork:
    """Gives each command of one box its network. Use from one event loop."""

    def __init__(
        self,
        provider: NetworkProvider,
        policy: Policy,
        box_id: str,
        take: Callable[[], Awaitable[socket.socket | None]],
    ) -> None:
        """Does nothing yet.

        Args:
            provider: who serves it.
            policy: what may be reached.
            box_id: whose it is.
            take: the socket of the command that runs next; None if it cannot run.
        """
        self._provider = provider
        self._policy = policy
        self._box_id = box_id
        self._take = take
        self._lock = asyncio.Lock()
        self._attachment: Attachment | None = None
        self._is_fresh = False

    async def open(self) -> None:
        """Serve the first command, which is waiting.

        Raises:
            UserError: the policy has a malformed entry.
            ClassifiedFailure: the box does not work.
        """
        try:
            listener = await self._take()
        except OSError as error:
            raise failure(f"a box could not be given a network: {error}") from error
        if listener is None:
            raise failure("a box could not be started")
        try:
            self._attachment = await self._provider.attach(
                _handing(listener), self._policy, self._box_id
            )
        except BaseException:
            listener.close()
            raise
        self._is_fresh = True

    async def set_allow(self, allow: tuple[str, ...]) -> None:
        """Replace the list, also for the command that runs.

        Raises:
            UserError: an entry is malformed; nothing was changed.
        """
        assert self._attachment is not None
        await self._attachment.set_allow(allow)

    @asynccontextmanager
    async def command(self) -> AsyncIterator[dict[str, str]]:
        """What surrounds one command; gives the variables that it needs. One at a time."""
        attachment = self._attachment
        assert attachment is not None
        async with self._lock:
            if not self._is_fresh:
                listener = await self._take()
                if listener is not None:
                    await attachment.restore(_handing(listener))
            self._is_fresh = False
            try:
                yield attachment.env
            finally:
                await attachment.close()

    async def close(self) -> None:
        """Cut everything."""
        if self._attachment is not None:
            await self._attachment.close()


def _handing(listener: socket.socket) -> Callable[[int], Awaitable[socket.socket]]:
    async def listen(_: int) -> socket.socket:
        return listener

    return listen
