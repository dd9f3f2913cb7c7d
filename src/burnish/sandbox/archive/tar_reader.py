"""Entries of a tar stream: POSIX (pax), GNU and old formats, read strictly and within bounds.

The standard library's reader loads headers of any size into memory and guesses when a header is
damaged; here hostile code may have written the archive. What this module does not understand it
refuses. It touches no files.
"""

import io
import re
from collections.abc import Iterator
from typing import BinaryIO

from burnish.sandbox.archive.entry import (
    MAX_NAME_BYTES,
    MAX_TARGET_BYTES,
    MAX_XATTR_BYTES,
    ArchiveLimits,
    Entry,
    EntryKind,
    Extent,
    box_id,
    check_path,
    kept_xattr,
    show,
)

BLOCK = 512
_CHUNK = 256 * 2**10
_PERMISSIONS = 0o1777
# Set-id bits are never kept: hostile code may have set them.
_KINDS = {
    b"0": EntryKind.FILE,
    b"\0": EntryKind.FILE,
    b"7": EntryKind.FILE,
    b"S": EntryKind.FILE,
    b"1": EntryKind.HARDLINK,
    b"2": EntryKind.SYMLINK,
    b"3": EntryKind.SPECIAL,
    b"4": EntryKind.SPECIAL,
    b"5": EntryKind.FOLDER,
    b"6": EntryKind.SPECIAL,
}
_SCHILY = b"SCHILY.xattr."
# What headers for all members may say; names and attributes are each member's own.
_GLOBAL = (b"uid", b"gid", b"mtime")
_MAX_MTIME_S = 2**40
# Archives are padded to whole records: 10 KiB as a rule, some megabytes for tapes.
_MAX_TRAILER_BYTES = 64 * 2**20


class TarReader:
    """Iterate over it for entries; `chunks` gives the content of the latest one."""

    def __init__(self, stream: BinaryIO, limits: ArchiveLimits) -> None:
        """Read nothing yet."""
        self._stream = stream
        self._limits = limits
        self.num_entries = 0
        """Members so far."""
        self.data_bytes = 0
        """Content of all members so far."""
        self._global: dict[bytes, bytes] = {}
        self._header_bytes = 0
        self._unread = 0
        self._padding = 0
        self._extents: tuple[Extent, ...] = ()

    def __iter__(self) -> Iterator[Entry]:
        """Each member in turn.

        Raises:
            ValueError: damaged, unknown, cut off, beyond a limit, or a name that leads out.
        """
        extended: dict[bytes, bytes] = {}
        while (header := self._next_header()) is not None:
            kind = header[156:157]
            if kind in b"xgLK":
                payload = self._payload(_number(header[124:136]))
                if kind == b"g":
                    records = _pax_records(payload)
                    self._global.update({key: records[key] for key in _GLOBAL if key in records})
                elif kind == b"x":
                    extended.update(_pax_records(payload))
                else:
                    name = b"path" if kind == b"L" else b"linkpath"
                    extended.setdefault(name, payload.split(b"\0", 1)[0])
                continue
            self.num_entries += 1
            if self.num_entries > self._limits.num_entries:
                raise ValueError(f"more than {self._limits.num_entries:,} members")
            yield self._entry(header, {**self._global, **extended})
            extended = {}
            self._skip_content()
        if extended:
            raise ValueError("it ends after an extended header")
        self._drain()

    def chunks(self) -> Iterator[tuple[int, bytes]]:
        """The content of the latest entry as (offset, data); holes are left out. Only once."""
        for offset, length in self._extents:
            while length:
                data = self._read(min(length, _CHUNK))
                self._unread -= len(data)
                yield offset, data
                offset += len(data)
                length -= len(data)
        self._extents = ()

    def _next_header(self) -> bytes | None:
        block = self._stream.read(BLOCK)
        if not block or not block.strip(b"\0"):
            return None
        if len(block) < BLOCK:
            block += self._read(BLOCK - len(block))
        plain = block[:148] + b" " * 8 + block[156:]
        claimed = _number(block[148:156])
        if claimed != sum(plain) and claimed != sum(memoryview(plain).cast("b")):
            # The second is how some old programs counted.
            raise ValueError("not a tar archive, or a damaged header")
        return block

    def _entry(self, header: bytes, extended: dict[bytes, bytes]) -> Entry:
        name, target, kind = _names(header, extended)
        size = _pax_number(extended, b"size", _number(header[124:136]))
        if kind is not EntryKind.FILE:
            size = 0
        if size < 0:
            raise ValueError(f"{show(name)} has a negative size")
        self._unread, self._padding = size, -size % BLOCK
        sparse = self._sparse_map(header, extended, name)
        apparent = size if sparse is None else sparse[0]
        self._extents = ((Extent(0, size),) if size else ()) if sparse is None else sparse[1]
        self._account(name, apparent, size)
        return Entry(
            path=check_path(name),
            kind=kind,
            mode=_number(header[100:108]) & _PERMISSIONS,
            uid=box_id(_pax_number(extended, b"uid", _number(header[108:116]))),
            gid=box_id(_pax_number(extended, b"gid", _number(header[116:124]))),
            size=apparent,
            mtime_ns=_mtime_ns(extended, _number(header[136:148])),
            target=target,
            xattrs=_xattrs(extended),
            extents=None if sparse is None else sparse[1],
        )

    def _account(self, name: bytes, apparent: int, data: int) -> None:
        self.data_bytes += data
        if self.data_bytes > self._limits.data_bytes:
            raise ValueError(f"more than {self._limits.data_bytes:,} bytes of content")
        if apparent > self._limits.file_bytes:
            raise ValueError(f"{show(name)} has {apparent:,} bytes: too many")

    def _payload(self, size: int) -> bytes:
        self._header_bytes += size
        if size < 0 or self._header_bytes > self._limits.header_bytes or size > 2**24:
            raise ValueError("extended headers are too long")
        data = self._read(size)
        self._read(-size % BLOCK)
        return data

    def _sparse_map(
        self, header: bytes, extended: dict[bytes, bytes], name: bytes
    ) -> tuple[int, tuple[Extent, ...]] | None:
        if header[156:157] == b"S":
            numbers, apparent = self._old_gnu_map(header), _number(header[483:495])
        elif b"GNU.sparse.major" in extended:
            if extended[b"GNU.sparse.major"] != b"1":
                raise ValueError(f"{show(name)} has an unknown form of sparse map")
            numbers, apparent = self._gnu_1_map(), _pax_number(extended, b"GNU.sparse.realsize", -1)
        elif b"GNU.sparse.map" in extended:
            numbers = [_digits(part) for part in extended[b"GNU.sparse.map"].split(b",")]
            apparent = _pax_number(extended, b"GNU.sparse.size", -1)
        elif any(key.startswith(b"GNU.sparse.") for key in extended):
            raise ValueError(f"{show(name)} has an unknown form of sparse map")
        else:
            return None
        return apparent, _check_extents(numbers, apparent, self._unread, name)

    def _old_gnu_map(self, header: bytes) -> list[int]:
        numbers: list[int] = []
        block, count, more = header[386:482], 4, header[482]
        while True:
            for index in range(count):
                pair = block[24 * index : 24 * index + 24]
                if pair.strip(b"\0 "):
                    numbers += [_number(pair[:12]), _number(pair[12:])]
            if not more:
                return numbers
            self._header_bytes += BLOCK
            if self._header_bytes > self._limits.header_bytes:
                raise ValueError("extended headers are too long")
            block, count = self._read(BLOCK), 21
            more = block[504]

    def _gnu_1_map(self) -> list[int]:
        text = b""
        wanted: int | None = None
        while wanted is None or text.count(b"\n") < wanted:
            if self._unread < BLOCK or len(text) > 2**24:
                raise ValueError("a sparse map is cut off or too long")
            text += self._read(BLOCK)
            self._unread -= BLOCK
            self._header_bytes += BLOCK
            if wanted is None and b"\n" in text:
                wanted = 1 + 2 * _digits(text.split(b"\n", 1)[0])
            if self._header_bytes > self._limits.header_bytes:
                raise ValueError("extended headers are too long")
        return [_digits(line) for line in text.split(b"\n")[1:wanted]]

    def _skip_content(self) -> None:
        left = self._unread + self._padding
        while left:
            left -= len(self._read(min(left, _CHUNK)))
        self._unread = self._padding = 0

    def _drain(self) -> None:
        """Read what follows the end mark: checksums of compressed data stand at its very end."""
        left = _MAX_TRAILER_BYTES
        while data := self._stream.read(_CHUNK):
            left -= len(data)
            if left < 0:
                raise ValueError("too much follows the end")

    def _read(self, size: int) -> bytes:
        data = self._stream.read(size)
        if len(data) == size:
            return data
        # Pipes give what they have.
        buffer = io.BytesIO()
        buffer.write(data)
        while buffer.tell() < size:
            data = self._stream.read(size - buffer.tell())
            if not data:
                raise ValueError("it is no tar, or cut off")
            buffer.write(data)
        return buffer.getvalue()


def _names(header: bytes, extended: dict[bytes, bytes]) -> tuple[bytes, bytes, EntryKind]:
    letter = header[156:157]
    if letter not in _KINDS:
        raise ValueError(f"a member of unknown type {letter!r}")
    kind = _KINDS[letter]
    name = header[:100].split(b"\0", 1)[0]
    if header[257:263] == b"ustar\0" and (prefix := header[345:500].split(b"\0", 1)[0]):
        name = prefix + b"/" + name
    name = extended.get(b"GNU.sparse.name", extended.get(b"path", name))
    if kind is EntryKind.FILE and name.endswith(b"/"):
        # How archives older than POSIX mark directories.
        kind = EntryKind.FOLDER
    target = extended.get(b"linkpath", header[157:257].split(b"\0", 1)[0])
    if kind is EntryKind.HARDLINK:
        return name, check_path(target), kind
    if kind is not EntryKind.SYMLINK:
        return name, b"", kind
    if not 0 < len(target) <= MAX_TARGET_BYTES or b"\0" in target:
        raise ValueError(f"the symbolic link {show(name)} has an empty or over-long target")
    return name, target, kind


def _number(field: bytes) -> int:
    if field[:1] >= b"\x80":
        # Base 256, two's complement below the marker bit.
        value = int.from_bytes(field, "big") - (1 << (8 * len(field) - 1))
        return value if field[0] < 0xC0 else value - (1 << (8 * len(field) - 1))
    text = field.strip(b" \0").split(b"\0", 1)[0].rstrip(b" ")
    if not text:
        return 0
    if not re.fullmatch(rb"[0-7]+", text):
        raise ValueError("not a tar archive, or a damaged header")
    return int(text, 8)


def _digits(text: bytes) -> int:
    if not re.fullmatch(rb"[0-9]{1,19}", text):
        raise ValueError(f"not a number in an extended header: {show(text)}")
    return int(text)


def _pax_number(extended: dict[bytes, bytes], key: bytes, otherwise: int) -> int:
    return _digits(extended[key]) if key in extended else otherwise


def _pax_records(payload: bytes) -> dict[bytes, bytes]:
    records: dict[bytes, bytes] = {}
    position = 0
    while position < len(payload):
        space = payload.find(b" ", position, position + 10)
        length = _digits(payload[position:space]) if space > 0 else 0
        end = position + length
        key, equals, value = payload[space + 1 : end - 1].partition(b"=")
        if space < 0 or end <= space or end > len(payload) or not equals:
            raise ValueError("a damaged extended header")
        if payload[end - 1 : end] != b"\n":
            raise ValueError("a damaged extended header")
        records.pop(key, None)
        if value or key.startswith(_SCHILY):
            records[key] = value
        position = end
    return records


def _mtime_ns(extended: dict[bytes, bytes], header_s: int) -> int:
    text = extended.get(b"mtime")
    if text is None:
        seconds, fraction = header_s, b""
    else:
        match = re.fullmatch(rb"(-?)([0-9]{1,18})(?:\.([0-9]*))?", text)
        if match is None:
            raise ValueError(f"not a time in an extended header: {show(text)}")
        seconds, fraction = int(match[2]), (match[3] or b"")[:9]
    nanoseconds = int(fraction.ljust(9, b"0"))
    if not -_MAX_MTIME_S < seconds < _MAX_MTIME_S:
        seconds, nanoseconds = 0, 0
    total = seconds * 10**9 + nanoseconds
    return -total if text is not None and match is not None and match[1] else total


def _xattrs(extended: dict[bytes, bytes]) -> dict[str, bytes]:
    found = {}
    for key, value in extended.items():
        if key.startswith(_SCHILY):
            name = key[len(_SCHILY) :].decode("utf-8", "surrogateescape")
            if kept_xattr(name):
                if len(key) - len(_SCHILY) > MAX_NAME_BYTES or len(value) > MAX_XATTR_BYTES:
                    raise ValueError(f"the attribute {show(key)} is longer than Linux has them")
                found[name] = value
    return found


def _check_extents(
    numbers: list[int], apparent: int, stored: int, name: bytes
) -> tuple[Extent, ...]:
    extents = []
    end = 0
    if len(numbers) % 2 or apparent < 0:
        raise ValueError(f"{show(name)} has a damaged sparse map")
    for offset, length in zip(numbers[::2], numbers[1::2], strict=True):
        if offset < end or length < 0 or offset + length > apparent:
            raise ValueError(f"{show(name)} has a damaged sparse map")
        end = offset + length
        if length:
            extents.append(Extent(offset, length))
    if sum(part.length for part in extents) != stored:
        raise ValueError(f"{show(name)} has a damaged sparse map")
    return tuple(extents)
