"""The server name in a TLS hello, from bytes that may come in any pieces. Pure.

RFC 8446, sections 4.1.2 and 5.1; RFC 6066, section 3. Anything unusual is refused instead of
guessed: two readings of one hello are what an attacker looks for.
"""

from burnish.sandbox.network.events import Reason, Refused

HANDSHAKE = 0x16
"""First byte of a hello."""
MAX_HELLO_BYTES = 16 * 2**10
ACCESS_DENIED_ALERT = bytes((0x15, 3, 3, 0, 2, 2, 49))
"""A fatal `access_denied`: what the client gets to see when its hello is refused."""
_MAX_RECORD_BYTES = 2**14
_CLIENT_HELLO = 1
_SERVER_NAME = 0
_ENCRYPTED = frozenset({0xFE0D, 0xFFCE})  # ECH, and ESNI before it


class HelloReader:
    """Collects records until the hello is complete; total work is linear in the bytes."""

    def __init__(self) -> None:
        """Nothing was read."""
        self.raw = bytearray()
        """All bytes so far, to be forwarded as they came."""
        self._message = bytearray()
        self._next = 0

    def feed(self, data: bytes) -> str | None:
        """The server name, or None as long as bytes are missing.

        Raises:
            Refused: it is malformed, too long, or says not whom it wants.
        """
        self.raw += data
        while len(self.raw) - self._next >= 5:
            kind, major, minor = self.raw[self._next : self._next + 3]
            size = int.from_bytes(self.raw[self._next + 3 : self._next + 5])
            if kind != HANDSHAKE or major != 3 or minor > 4 or not 0 < size <= _MAX_RECORD_BYTES:
                raise Refused(Reason.BAD_HELLO, "malformed TLS record")
            if self._next + 5 + size > MAX_HELLO_BYTES:
                raise Refused(Reason.BAD_HELLO, "the TLS hello is too long")
            if len(self.raw) - self._next < 5 + size:
                return None
            self._message += self.raw[self._next + 5 : self._next + 5 + size]
            self._next += 5 + size
            if (name := self._complete()) is not None:
                return name
        return None

    def _complete(self) -> str | None:
        if self._message[0] != _CLIENT_HELLO:
            raise Refused(Reason.BAD_HELLO, "not a TLS hello")
        if len(self._message) < 4:
            return None
        size = int.from_bytes(self._message[1:4])
        if size > MAX_HELLO_BYTES:
            raise Refused(Reason.BAD_HELLO, "the TLS hello is too long")
        if len(self._message) < 4 + size:
            return None
        return server_name(bytes(self._message[4:]))  # what follows it in its record is an error


class _Fields:
    """Takes fields off a message."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def take(self, size: int) -> bytes:
        if size > len(self._data) - self._at:
            raise Refused(Reason.BAD_HELLO, "truncated TLS hello")
        self._at += size
        return self._data[self._at - size : self._at]

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size))

    def vector(self, size_of_length: int) -> bytes:
        return self.take(self.number(size_of_length))

    @property
    def empty(self) -> bool:
        return self._at == len(self._data)


def server_name(hello: bytes) -> str:
    """The one name in the body of a ClientHello; empty if it has none.

    Raises:
        Refused: it is malformed, or hides the name.
    """
    fields = _Fields(hello)
    fields.take(2 + 32)  # version, random
    fields.vector(1)  # session
    fields.vector(2)  # cipher suites
    fields.vector(1)  # compression methods
    found = ""
    if not fields.empty:
        extensions = _Fields(fields.vector(2))
        if not fields.empty:
            raise Refused(Reason.BAD_HELLO, "bytes after the TLS hello")
        seen: set[int] = set()
        while not extensions.empty:
            kind = extensions.number(2)
            body = extensions.vector(2)
            if kind in seen:
                raise Refused(Reason.BAD_HELLO, "a TLS extension comes twice")
            seen.add(kind)
            if kind in _ENCRYPTED:
                raise Refused(Reason.HIDDEN_SERVER_NAME, "the server name is encrypted (ECH)")
            if kind == _SERVER_NAME:
                found = _read_name(body)
    return found


def _read_name(body: bytes) -> str:
    outer = _Fields(body)
    names = _Fields(outer.vector(2))
    kind = names.number(1)
    name = names.vector(2)
    if kind != 0 or not names.empty or not outer.empty or not name or not name.isascii():
        raise Refused(Reason.BAD_HELLO, "malformed server name")
    return name.decode("ascii")
