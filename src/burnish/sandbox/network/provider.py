"""Gives boxes their allow-listed network; usable from any event loop.

The proxy runs in a thread with a loop of its own, so that a busy or ended loop of a caller never
stops the traffic of a box. The thread starts with the first attachment and ends with `close`.
"""

import asyncio
import os
import socket
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from burnish.core.boxes import Policy
from burnish.core.errors import UserError
from burnish.sandbox.network.addresses import (
    Resolver,
    SystemResolver,
    parse_private,
    parse_reachable,
)
from burnish.sandbox.network.base import PROXY_PORT, Listen
from burnish.sandbox.network.bounds import ProxyBounds
from burnish.sandbox.network.events import EventSink
from burnish.sandbox.network.loop_thread import LoopThread
from burnish.sandbox.network.policy import AllowRules
from burnish.sandbox.network.proxy import BoxProxy
from burnish.sandbox.network.shares import Shares, affordable_connections
from burnish.sandbox.network.upstream import Dialer, Outside, dial

_MAX_SOCKET_PATH = 107
_BACKLOG = 128


class Attachment:
    """The network of one box."""

    def __init__(self, network: "AllowListNetwork", allow: tuple[str, ...], box_id: str) -> None:
        """Made by `AllowListNetwork.attach`."""
        self._network = network
        self._allow = allow
        self._rules = network.read(allow)
        self._box_id = box_id
        self._proxy: BoxProxy | None = None

    @property
    def env(self) -> dict[str, str]:
        """Variables that make ordinary programs use the proxy.

        `ALL_PROXY` is HTTP too: the port speaks SOCKS as well, but some clients fail at a SOCKS
        URL if their module for it is missing.
        """
        url = f"http://127.0.0.1:{PROXY_PORT}"
        own = "localhost,127.0.0.1,::1"
        values = {"HTTP_PROXY": url, "HTTPS_PROXY": url, "ALL_PROXY": url, "NO_PROXY": own}
        return {
            **values,
            **{name.lower(): value for name, value in values.items()},
            "NODE_USE_ENV_PROXY": "1",
        }

    @property
    def allow(self) -> tuple[str, ...]:
        """The present list, which forks and restored boxes go on with."""
        return self._allow

    async def set_allow(self, allow: tuple[str, ...]) -> None:
        """Replace the list; connections that it no longer allows are cut before this returns.

        Raises:
            UserError: an entry is malformed, or can never be reached; nothing was changed.
        """
        rules = self._network.read(allow)
        self._allow, self._rules = allow, rules
        if (proxy := self._proxy) is not None:
            await self._network.run(lambda: proxy.set_rules(rules))

    async def fork(self, listen: Listen, box_id: str) -> "Attachment":
        """Attach another box with the present list."""
        return await self._network.attach(listen, Policy(allow=self._allow), box_id)

    async def restore(self, listen: Listen) -> None:
        """Go on with the present list after the box got a new network (rollback, snapshot).

        What `listen` raises is passed on; the box then has no network, and this may be repeated.
        """
        await self.close()
        # The list is read once the socket is there: it may have changed in the meantime.
        self._proxy = await self._network.start(listen, lambda: self._rules, self._box_id)

    async def close(self) -> None:
        """Cut everything. May be called again."""
        if self._proxy is not None:
            await self._network.end(self._proxy)
            self._proxy = None


class AllowListNetwork:
    """The proxy of all boxes of a pool."""

    def __init__(
        self,
        sink: EventSink,
        *,
        private: tuple[str, ...] = (),
        bounds: ProxyBounds | None = None,
        resolver: Resolver | None = None,
        dialer: Dialer = dial,
        now: Callable[[], float] = time.time,
    ) -> None:
        """Starts nothing yet.

        Args:
            sink: gets every decision, in the thread of the proxy.
            private: exact `host:port` entries that may lead to private or loopback addresses: a
                mirror in the own network. They open nothing: the policy must list them too.
            bounds: what one box may use.
            resolver: looks names up; the system's by default.
            dialer: connects to addresses.
            now: seconds since the epoch.

        Raises:
            UserError: an entry of `private` is malformed.
        """
        self._sink = sink
        self._bounds = bounds or ProxyBounds()
        self._own_resolver = SystemResolver() if resolver is None else None
        found = resolver or self._own_resolver
        assert found is not None
        self._private = parse_private(private)
        self._outside = Outside(self._bounds, resolver=found, dialer=dialer, private=self._private)
        self._now = now
        self._shares = Shares(
            num_in_all=affordable_connections(), num_per_box=self._bounds.num_connections
        )
        self._thread = LoopThread("sandbox-network")
        self._proxies: set[BoxProxy] = set()

    def check(self, allow: tuple[str, ...]) -> None:
        """See `NetworkProvider.check`."""
        self.read(allow)

    def read(self, allow: tuple[str, ...]) -> AllowRules:
        """The rules of a list.

        Raises:
            UserError: an entry is malformed, or can never be reached.
        """
        return parse_reachable(allow, self._private)

    async def attach(self, listen: Listen, policy: Policy, box_id: str) -> Attachment:
        """Serve a box.

        Raises:
            UserError: an entry of the policy is malformed, or can never be reached.
        """
        attachment = Attachment(self, policy.allow, box_id)
        await attachment.restore(listen)
        return attachment

    async def start(self, listen: Listen, rules: Callable[[], AllowRules], box_id: str) -> BoxProxy:
        """Serve a socket of a box by the rules of the moment at which it is there."""
        listener = await listen(PROXY_PORT)
        proxy = BoxProxy(
            box_id,
            rules(),
            self._outside,
            self._bounds,
            shares=self._shares,
            sink=self._sink,
            now=self._now,
        )
        # From here nothing waits: a cancelled caller cannot leave a proxy that nobody knows.
        self._proxies.add(proxy)
        try:
            self._thread.call(lambda: proxy.start(listener))
        except RuntimeError:
            self._proxies.discard(proxy)
            listener.close()
            raise
        return proxy

    async def end(self, proxy: BoxProxy) -> None:
        """Close one proxy, if it is not closed yet."""
        if proxy in self._proxies:
            self._proxies.discard(proxy)
            await self.run(proxy.close)

    async def run(self, work: Callable[[], Awaitable[None]]) -> None:
        """Run in the thread, to the end even if the caller is cancelled."""
        await self._thread.run(work)

    async def close(self) -> None:
        """Cut all boxes and end the thread. May be called again."""
        await self._thread.close(self._close_all)
        if self._own_resolver is not None:
            await self._own_resolver.close()

    async def _close_all(self) -> None:
        proxies = tuple(self._proxies)
        self._proxies.clear()
        await asyncio.gather(*(proxy.close() for proxy in proxies))


def unix_listener(path: Path) -> Listen:
    """A `Listen` for boxes that `relay.py` serves: a unix socket to be bound into the box.

    Whoever can reach the path can use the allow list; keep it in a directory of mode 0700. It is
    removed with the attachment.
    """

    async def listen(_: int) -> socket.socket:
        if len(os.fsencode(path)) > _MAX_SOCKET_PATH:
            raise UserError(
                f"`{path}` is too long for a socket.", fix="use a shorter directory (TMPDIR)."
            )
        made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            made.bind(os.fspath(path))
            os.chmod(path, 0o666)  # users of the box are others on the host
            made.listen(_BACKLOG)
        except OSError:
            made.close()
            raise
        return made

    return listen
