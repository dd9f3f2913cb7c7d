"""The way out: a name is resolved once, an address is chosen and stays."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from burnish.sandbox.network.addresses import Resolver, choose
from burnish.sandbox.network.bounds import ProxyBounds
from burnish.sandbox.network.events import Reason, Refused
from burnish.sandbox.network.policy import Host

BUFFER_BYTES = 32 * 2**10
"""Limit of the stream readers: each side of a connection holds at most about three times this."""
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Dialer = Callable[[str, int], Awaitable[Streams]]
"""Connects to an address; never resolves."""


class Upstream(NamedTuple):
    """An open connection to a server."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    address: str


async def dial(address: str, port: int) -> Streams:
    """Connect to a numeric address."""
    return await asyncio.open_connection(address, port, limit=BUFFER_BYTES)


class Outside:
    """Opens connections to servers that the policy allows."""

    def __init__(
        self,
        bounds: ProxyBounds,
        *,
        resolver: Resolver,
        dialer: Dialer = dial,
        private: frozenset[tuple[str, int]] = frozenset(),
    ) -> None:
        """`private`: pairs of host and port that may lead to private addresses."""
        self._bounds = bounds
        self._resolver = resolver
        self._dialer = dialer
        self._private = private

    async def open(self, host: Host, port: int, lookups: asyncio.Semaphore) -> Upstream:
        """Resolve, choose, connect.

        Raises:
            Refused: there is no address, none that is allowed, or nobody answers.
        """
        private = (host.text, port) in self._private
        answers = [host.text] if host.is_address else await self._resolve(host, port, lookups)
        addresses = choose(answers, private=private)
        if not addresses:
            raise Refused(Reason.ADDRESS, f"{host.text} has no public address")
        try:
            async with asyncio.timeout(self._bounds.connect_s):
                return await self._connect(addresses, port, private)
        except TimeoutError:
            raise Refused(Reason.UNREACHABLE, f"{host.text}:{port} does not answer") from None

    async def _resolve(self, host: Host, port: int, lookups: asyncio.Semaphore) -> Sequence[str]:
        try:
            async with asyncio.timeout(self._bounds.lookup_s), lookups:
                answers = await self._resolver(host.text, port)
        except (OSError, UnicodeError):
            answers = ()
        if not answers:
            raise Refused(Reason.UNRESOLVED, f"{host.text} cannot be resolved")
        return answers

    async def _connect(self, addresses: tuple[str, ...], port: int, private: bool) -> Upstream:
        for address in addresses:
            try:
                reader, writer = await self._dialer(address, port)
            except OSError:
                continue
            if not private and _is_own(writer):
                writer.transport.abort()
                raise Refused(Reason.ADDRESS, "that is the host of this box")
            return Upstream(reader, writer, address)
        raise Refused(Reason.UNREACHABLE, f"port {port} cannot be reached")


def _is_own(writer: asyncio.StreamWriter) -> bool:
    """Whether a public address turned out to be one of this host: the kernel then uses it twice."""
    ours, theirs = (writer.get_extra_info(end) for end in ("sockname", "peername"))
    return bool(ours and theirs and ours[0] == theirs[0])


async def finish(writer: asyncio.StreamWriter, linger_s: float) -> None:
    """Flush and close; what is not taken in time is dropped."""
    writer.close()
    with contextlib.suppress(OSError):
        async with asyncio.timeout(linger_s):
            await writer.wait_closed()
