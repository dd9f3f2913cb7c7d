"""Where the body of a request ends. Pure.

What follows the body never reaches the server: a second request there would not have been checked.
"""

from burnish.sandbox.network.events import Reason, Refused

_MAX_SIZE_LINE_BYTES = 18
_HEX = frozenset(b"0123456789abcdefABCDEF")


class BodyFramer:
    """Passes on exactly one body."""

    def __init__(self, length: int | None) -> None:
        """`length` in bytes; None: in chunks, without extensions and trailers."""
        self._left = length or 0
        self._chunked = length is None
        self._line = bytearray()
        self._after_chunk = False
        self._last = False
        self.done = length == 0
        """Whether the body is complete."""

    def feed(self, data: bytes) -> bytes:
        """The part of `data` that belongs to the body, in the form in which it goes on.

        Raises:
            Refused: malformed chunks.
        """
        if not self._chunked:
            body = data[: self._left]
            self._left -= len(body)
            self.done = self._left == 0
            return body
        passed = bytearray()
        at = 0
        while at < len(data) and not self.done:
            if self._left:
                piece = data[at : at + self._left]
                passed += piece
                self._left -= len(piece)
                at += len(piece)
                self._after_chunk = self._left == 0
            else:
                end = data.find(b"\n", at) + 1 or len(data)
                self._line += data[at:end]
                at = end
                passed += self._end_line()
        return bytes(passed)

    def _end_line(self) -> bytes:
        if len(self._line) > _MAX_SIZE_LINE_BYTES:
            raise Refused(Reason.BAD_REQUEST, "malformed chunk")
        if not self._line.endswith(b"\n"):
            return b""
        line, self._line = bytes(self._line), bytearray()
        if self._after_chunk or self._last:
            if line != b"\r\n":
                raise Refused(Reason.BAD_REQUEST, "malformed chunk")
            self.done = self._last
            self._after_chunk = False
            return line
        digits = line.removesuffix(b"\r\n")
        if digits == line or not digits or not _HEX.issuperset(digits):
            raise Refused(Reason.BAD_REQUEST, "malformed chunk")
        self._left = int(digits, 16)
        self._last = self._left == 0
        return line
