"""Write entries as a tar stream: the same entries and contents always give the same bytes.

The format is POSIX pax over ustar: extended headers only where ustar has no room. Sparse files take
the form "GNU 1.0", which GNU tar, bsdtar, Go and Python read.
"""

from collections.abc import Iterable
from typing import BinaryIO

from burnish.sandbox.archive.entry import MAX_TARGET_BYTES, Entry, EntryKind, Extent
from burnish.sandbox.archive.tar_reader import BLOCK

_LETTERS = {
    EntryKind.FILE: b"0",
    EntryKind.HARDLINK: b"1",
    EntryKind.SYMLINK: b"2",
    EntryKind.FOLDER: b"5",
}
_MAX_OCTAL_11 = 8**11 - 1
_MAX_OCTAL_7 = 8**7 - 1


class TarWriter:
    """Writes to a stream that it does not own."""

    def __init__(self, stream: BinaryIO, header_limit_bytes: int) -> None:
        """Start an archive.

        Args:
            stream: where to.
            header_limit_bytes: long names, attributes and sparse maps may take so much in all.
        """
        self._stream = stream
        self._header_bytes_left = header_limit_bytes

    def add(self, entry: Entry, chunks: Iterable[bytes] = ()) -> None:
        """Append one member.

        Args:
            entry: what it is; not a special file.
            chunks: the stored content, `entry.data_bytes` in all, holes left out.

        Raises:
            ValueError: the content has another length, or headers take too much in all.
        """
        sparse_map = _sparse_map(entry)
        stored = entry.data_bytes + len(sparse_map)
        self._extended_header(entry, stored)
        self._stream.write(_header(entry, stored))
        self._stream.write(sparse_map)
        written = len(sparse_map)
        for chunk in chunks:
            written += len(chunk)
            self._stream.write(chunk)
        if written != stored:
            raise ValueError(f"content of {written} bytes where {stored} were announced")
        self._stream.write(bytes(-stored % BLOCK))

    def finish(self) -> None:
        """Write the end mark."""
        self._stream.write(bytes(2 * BLOCK))

    def _extended_header(self, entry: Entry, stored: int) -> None:
        payload = b"".join(_record(key, value) for key, value in _extended(entry, stored))
        if not payload:
            return
        self._header_bytes_left -= len(payload)
        if self._header_bytes_left < 0:
            raise ValueError("names and attributes take too much space for an archive")
        name = b"PaxHeaders/" + entry.path[-80:].replace(b"/", b"_")
        self._stream.write(_block(name, 0o644, 0, 0, len(payload), 0, b"x", b""))
        self._stream.write(payload + bytes(-len(payload) % BLOCK))


def _extended(entry: Entry, stored: int) -> Iterable[tuple[bytes, bytes]]:
    path = _full_path(entry)
    binary = not (_is_utf8(entry.path) and _is_utf8(entry.target))
    records: list[tuple[bytes, bytes]] = []
    if binary:
        records.append((b"hdrcharset", b"BINARY"))
    if entry.extents is not None:
        records += [
            (b"GNU.sparse.major", b"1"),
            (b"GNU.sparse.minor", b"0"),
            (b"GNU.sparse.name", path),
            (b"GNU.sparse.realsize", b"%d" % entry.size),
        ]
    if len(path) > 100 or not path.isascii():
        records.append((b"path", path))
    if len(entry.target) > 100 or not entry.target.isascii():
        assert len(entry.target) <= MAX_TARGET_BYTES or entry.kind is EntryKind.HARDLINK
        records.append((b"linkpath", entry.target))
    if stored > _MAX_OCTAL_11:
        records.append((b"size", b"%d" % stored))
    if entry.mtime_ns % 10**9 or not 0 <= entry.mtime_ns // 10**9 <= _MAX_OCTAL_11:
        records.append((b"mtime", _time(entry.mtime_ns)))
    for name in sorted(entry.xattrs):
        key = b"SCHILY.xattr." + name.encode("utf-8", "surrogateescape")
        records.append((key, entry.xattrs[name]))
    return records


def _header(entry: Entry, stored: int) -> bytes:
    seconds = min(max(entry.mtime_ns // 10**9, 0), _MAX_OCTAL_11)
    size = stored if stored <= _MAX_OCTAL_11 else 0
    path = _full_path(entry)
    # Readers that know no extended headers must not take a cut-off name for a directory's.
    short = path if len(path) <= 100 else path[:99].rstrip(b"/")
    return _block(
        short,
        entry.mode & 0o7777,
        entry.uid,
        entry.gid,
        size,
        seconds,
        _LETTERS[entry.kind],
        entry.target[:100],
    )


def _block(
    name: bytes,
    mode: int,
    uid: int,
    gid: int,
    size: int,
    mtime_s: int,
    letter: bytes,
    target: bytes,
) -> bytes:
    assert uid <= _MAX_OCTAL_7
    assert gid <= _MAX_OCTAL_7
    fields = (
        name.ljust(100, b"\0"),
        b"%07o\0%07o\0%07o\0%011o\0%011o\0" % (mode, uid, gid, size, mtime_s),
        b" " * 8,
        letter,
        target.ljust(100, b"\0"),
        b"ustar\x0000",
    )
    block = b"".join(fields).ljust(BLOCK, b"\0")
    return block[:148] + b"%06o\0 " % sum(block) + block[156:]


def _sparse_map(entry: Entry) -> bytes:
    if entry.extents is None:
        return b""
    extents = list(entry.extents)
    if not extents or sum(extents[-1]) < entry.size:
        # GNU tar takes the size from the last extent.
        extents.append(Extent(entry.size, 0))
    numbers = [len(extents)]
    for extent in extents:
        numbers += extent
    text = b"".join(b"%d\n" % number for number in numbers)
    return text + bytes(-len(text) % BLOCK)


def _record(key: bytes, value: bytes) -> bytes:
    rest = len(key) + len(value) + 3
    length = rest + len(str(rest))
    if len(str(length)) != len(str(rest)):
        length = rest + len(str(length))
    return b"%d %s=%s\n" % (length, key, value)


def _full_path(entry: Entry) -> bytes:
    return entry.path + b"/" if entry.kind is EntryKind.FOLDER else entry.path


def _is_utf8(name: bytes) -> bool:
    try:
        name.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _time(mtime_ns: int) -> bytes:
    sign = b"-" if mtime_ns < 0 else b""
    seconds, nanoseconds = divmod(abs(mtime_ns), 10**9)
    text = b"%s%d.%09d" % (sign, seconds, nanoseconds)
    return text.rstrip(b"0").rstrip(b".")
