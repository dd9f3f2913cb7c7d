"""Which addresses an allowed name may lead to. Pure, but for the system's resolver.

The tables are our own and not `ipaddress.is_global`, whose answers changed between releases of
Python. Sources: the IANA special-purpose address registries, and the metadata services of clouds.
"""

import asyncio
import ipaddress
import socket
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from burnish.core.errors import UserError
from burnish.sandbox.network.policy import AllowRules, parse_allow, parse_entry

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Resolver = Callable[[str, int], Awaitable[Sequence[str]]]
"""Addresses of a name, best first; raises OSError if there are none."""
MAX_ADDRESSES = 4
"""How many addresses of one answer are tried."""
_LAST_ANSWER_S = 2.0

_NEAR = tuple(
    ipaddress.ip_network(text)
    for text in (
        *("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "127.0.0.0/8", "100.64.0.0/10"),
        *("::1/128", "fc00::/7"),
        # Reserved for protocols, benchmarks and documentation; some networks use them inside.
        *("192.0.0.0/24", "198.18.0.0/15", "192.0.2.0/24", "198.51.100.0/24", "203.0.113.0/24"),
        *("2001:db8::/32", "3fff::/20"),
    )
)
"""What `private` may open."""
_NEVER = tuple(
    ipaddress.ip_network(text)
    for text in (
        *("0.0.0.0/8", "169.254.0.0/16", "224.0.0.0/4", "240.0.0.0/4"),
        # Ways from IPv6 to IPv4: relays, Teredo and other protocols, 6to4.
        *("192.88.99.0/24", "2001::/23", "2002::/16"),
        # Metadata services: Azure's (a public address), Alibaba's, Oracle's, Amazon's.
        *("168.63.129.16/32", "100.100.100.200/32", "192.0.0.192/32", "fd00:ec2::254/128"),
    )
)
_UNICAST = ipaddress.IPv6Network("2000::/3")
"""All that is assigned. What lies outside (mapped IPv4, NAT64, link-local, multicast) is not
reached; a host with nothing but NAT64 therefore reaches only servers that have IPv6."""


def is_public(address: Address) -> bool:
    """Whether it is an address of the public internet, and of nothing near this host."""
    if isinstance(address, ipaddress.IPv6Address) and address not in _UNICAST:
        return False
    return not any(address in network for network in _NEVER + _NEAR)


def is_private(address: Address) -> bool:
    """Whether it is a private, loopback or reserved address, and no metadata service."""
    return any(address in network for network in _NEAR) and not any(
        address in network for network in _NEVER
    )


def choose(answers: Sequence[str], *, private: bool) -> tuple[str, ...]:
    """The addresses of an answer that may be tried, in its order.

    Args:
        answers: what the resolver said.
        private: whether private addresses count.
    """
    chosen: list[str] = []
    for text in answers:
        try:
            address = ipaddress.ip_address(text)
        except ValueError:
            continue
        if is_public(address) or (private and is_private(address)):
            chosen.append(str(address))
    return tuple(dict.fromkeys(chosen))[:MAX_ADDRESSES]


def parse_private(entries: tuple[str, ...]) -> frozenset[tuple[str, int]]:
    """Read the exact `host:port` entries that may lead to private addresses.

    Raises:
        UserError: an entry is malformed, a wildcard, or without a port.
    """
    pairs = set()
    for entry in entries:
        rule = parse_entry(entry)
        if rule.wildcard or len(rule.ports) != 1:
            raise UserError(
                f"`{entry}` may not lead to private addresses.",
                fix="write one exact host with its port, such as `mirror.example:8081`.",
            )
        pairs.add((rule.host, next(iter(rule.ports))))
    return frozenset(pairs)


def parse_reachable(entries: tuple[str, ...], private: frozenset[tuple[str, int]]) -> AllowRules:
    """Read `Policy.allow`; what names lead to is seen when they are used.

    Args:
        entries: of the policy.
        private: pairs of host and port that may lead to private addresses.

    Raises:
        UserError: an entry is malformed, or an address that no box can ever reach.
    """
    rules = parse_allow(entries)
    for rule in rules:
        opened = any((rule.host, port) in private for port in rule.ports)
        if rule.is_address and not choose((rule.host,), private=opened):
            mirror = is_private(ipaddress.ip_address(rule.host))
            raise UserError(
                f"`{rule.entry}` in an allow list can never be reached: it is no public address.",
                fix="to reach a mirror in the own network put its NAME:PORT into "
                "sandbox.private_hosts"
                if mirror
                else "leave it out",
            )
    return rules


class SystemResolver:
    """The resolver of this host, with threads of its own.

    Its own, because a look-up cannot be cancelled: the default executor of an event loop would hold
    up the end of the loop until the last answer.
    """

    def __init__(self, num_threads: int = 16) -> None:
        """Threads start with the first look-ups."""
        self._executor = ThreadPoolExecutor(num_threads, thread_name_prefix="sandbox-resolver")
        self._open: set[Future[list[str]]] = set()

    async def __call__(self, host: str, port: int) -> Sequence[str]:
        """Addresses in the order of RFC 6724."""
        asked = self._executor.submit(_look_up, host, port)
        self._open.add(asked)
        asked.add_done_callback(self._open.discard)
        return await asyncio.wrap_future(asked)

    async def close(self) -> None:
        """End the threads. One whose answer does not come in a while ends when it has it."""
        self._executor.shutdown(wait=False, cancel_futures=True)
        if running := [asyncio.wrap_future(asked) for asked in tuple(self._open)]:
            await asyncio.wait(running, timeout=_LAST_ANSWER_S)
        # Without an open look-up the threads have nothing left to do but to end.
        self._executor.shutdown(wait=not self._open)


def _look_up(host: str, port: int) -> list[str]:
    answers = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_ADDRCONFIG)
    return [str(address[0]) for _, _, _, _, address in answers]
