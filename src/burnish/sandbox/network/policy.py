"""Which hosts and ports an allow list names. Pure.

An entry is a host name, `*.` and a host name (any name below it, not itself), or an address; with
`:PORT` that port only, else 80 and 443. Names are compared in lower case, without a final dot, in
their ASCII form (punycode).
"""

import ipaddress
import re
from typing import NamedTuple

from burnish.core.errors import UserError
from burnish.core.records import Record
from burnish.sandbox.network.events import Reason

DEFAULT_PORTS = frozenset({80, 443})
MAX_ENTRIES = 1024
_LABEL = re.compile(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?")
_PORT = re.compile(r"[0-9]{1,5}")
# What inet_aton and browsers take for an address: 2130706433, 0x7f.1, 0177.0.0.1, 127.1.
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")


class Host(NamedTuple):
    """A host in its one spelling."""

    text: str
    is_address: bool


class AllowRule(Record, frozen=True, kw_only=True):
    """One entry of an allow list, read."""

    entry: str
    """As it was written."""
    host: str
    """In its one spelling, without `*.`."""
    ports: frozenset[int]
    """Allowed ports."""
    wildcard: bool = False
    """Whether it means the names below `host` instead of `host`."""
    is_address: bool = False
    """Whether `host` is an address."""

    def covers(self, host: Host) -> bool:
        """Whether it names this host."""
        if host.is_address != self.is_address:
            return False
        return host.text.endswith("." + self.host) if self.wildcard else host.text == self.host


AllowRules = tuple[AllowRule, ...]


class Decision(Record, frozen=True, kw_only=True):
    """Whether a host and port may be reached."""

    allowed: bool
    """The answer."""
    reason: Reason
    """Why."""
    host: Host
    """What was asked for, in its one spelling if it has one."""
    port: int
    """Echo."""


def decide(host: str, port: int, allow: AllowRules) -> Decision:
    """Judge what a box asks for. `host` may be anything that a hostile client wrote."""
    read = read_host(host)
    if isinstance(read, Reason):
        return Decision(allowed=False, reason=read, host=Host(host, False), port=port)
    rules = [rule for rule in allow if rule.covers(read)]
    if any(port in rule.ports for rule in rules):
        return Decision(allowed=True, reason=Reason.ON_LIST, host=read, port=port)
    unknown = Reason.IP_LITERAL if read.is_address else Reason.NOT_LISTED
    return Decision(allowed=False, reason=Reason.PORT if rules else unknown, host=read, port=port)


def read_host(text: str) -> Host | Reason:
    """The one spelling of a host, or why it has none. Only ASCII is accepted."""
    if not text.isascii() or len(text) > 255:
        return Reason.BAD_NAME
    name = text.lower()
    if name.startswith("[") and name.endswith("]"):
        name = name[1:-1]
        if ":" not in name:
            return Reason.BAD_NAME
    if ":" in name:
        return _read_address(name)
    name = name.removesuffix(".")
    labels = name.split(".")
    if _NUMBER.fullmatch(labels[-1]):
        return _read_address(name)
    if len(name) > 253 or not all(_LABEL.fullmatch(label) for label in labels):
        return Reason.BAD_NAME
    return Host(name, False)


def _read_address(text: str) -> Host | Reason:
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return Reason.IP_LITERAL  # some resolver may take it for an address
    if isinstance(address, ipaddress.IPv6Address) and address.scope_id:
        return Reason.IP_LITERAL
    return Host(str(address), True)


def parse_allow(entries: tuple[str, ...]) -> AllowRules:
    """Read `Policy.allow`.

    Raises:
        UserError: an entry is malformed; names it.
    """
    if len(entries) > MAX_ENTRIES:
        raise UserError(
            f"The allow list has {len(entries)} entries, {MAX_ENTRIES} are possible.",
            fix="use wildcards such as `*.pythonhosted.org`.",
        )
    return tuple(parse_entry(entry) for entry in entries)


def parse_entry(entry: str) -> AllowRule:
    """Read one entry.

    Raises:
        UserError: it is malformed.
    """
    text = entry.strip()
    _refuse_other_notations(entry, text)
    name, port = _split_port(entry, text)
    wildcard = name.startswith("*.")
    name = name.removeprefix("*.")
    if "*" in name:
        raise _bad(entry, "has a `*` that is not its whole first label", "write `*.example.org`.")
    read = read_host(_to_ascii(entry, name))
    if isinstance(read, Reason):
        raise _bad(entry, "is not a host name", "write it as `example.org` or `example.org:8443`.")
    if wildcard and (read.is_address or "." not in read.text):
        raise _bad(entry, "allows too much", "put at least two labels after `*.`.")
    return AllowRule(
        entry=entry,
        host=read.text,
        ports=DEFAULT_PORTS if port is None else frozenset({port}),
        wildcard=wildcard,
        is_address=read.is_address,
    )


def _refuse_other_notations(entry: str, text: str) -> None:
    if "://" in text:
        raise _bad(entry, "is a URL", "write the host name alone; paths cannot be told apart.")
    if "/" in text:
        raise _bad(entry, "is a range of addresses or a path", "list host names.")
    if "@" in text:
        raise _bad(entry, "holds a user name", "write the host name alone.")


def _split_port(entry: str, text: str) -> tuple[str, int | None]:
    if text.startswith("["):
        name, bracket, rest = text.partition("]")
        name += bracket
    elif text.count(":") > 1:
        return text, None  # an IPv6 address
    else:
        name, colon, number = text.partition(":")
        rest = colon + number
    if not rest:
        return name, None
    if not rest.startswith(":") or not _PORT.fullmatch(rest[1:]) or not 0 < int(rest[1:]) < 65536:
        raise _bad(entry, "has no valid port", "write a number from 1 to 65535 after the colon.")
    return name, int(rest[1:])


def _to_ascii(entry: str, name: str) -> str:
    """Punycode of an international name, unless the standards disagree on it.

    The codec of Python follows the standard of 2003, browsers that of 2008: they differ where
    encoding loses something (`ss` for a sharp s), which the way back shows.
    """
    if name.isascii():
        return name
    plain = name.removesuffix(".").lower()
    try:
        encoded = plain.encode("idna").decode("ascii")
        same = encoded.encode("ascii").decode("idna") == plain
    except UnicodeError:
        same = False
    if not same:
        raise _bad(entry, "is not an international name of one meaning", "write it in punycode.")
    return encoded


def _bad(entry: str, what: str, fix: str) -> UserError:
    return UserError(f"`{entry}` in an allow list {what}.", fix=fix)
