"""A durable log of rows: small entries first, compacted into Parquet segments.

    append(rows) -> 0000000017.entry           one atomic, synced file per entry
    every N      -> 0000000001-0000000032.parquet   entries 1..32, then their files go
    rewrite(f)   -> 0000000001-0000000032.parquet   the same range with fewer rows

Each entry has a sequence number and a segment names the range that it replaces, so a segment
becomes valid with one rename: whatever lies inside its range is dead from that moment, whether or
not a crash came before it was deleted. Nothing acknowledged is lost and nothing is read twice.
"""

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from burnish.core.disk import is_leftover, sync_directory, write_atomically
from burnish.core.errors import UserError
from burnish.store.schema import Table, arrow_schema

if TYPE_CHECKING:
    import pyarrow as pa

Row = dict[str, Any]

_ENTRY = re.compile(r"(\d{10})\.entry")
_SEGMENT = re.compile(r"(\d{10})-(\d{10})\.parquet")
# A reader of a live run may find that what it listed was compacted meanwhile; each retry needs
# another compaction in the same instant, so this is never reached in practice.
_READ_ATTEMPTS = 20


class Piece(NamedTuple):
    """A file that holds entries `first` to `last`."""

    first: int
    last: int
    path: Path

    @property
    def is_entry(self) -> bool:
        """Whether it is a single entry that was not compacted yet."""
        return self.path.suffix == ".entry"


class SegmentLog:
    """The writer: one per directory. Not thread-safe; its owners lock."""

    def __init__(self, directory: Path, table: Table, entries_per_segment: int) -> None:
        """Open or create `directory` and remove what a crash left dead."""
        assert entries_per_segment > 0
        self._directory = directory
        self._table = table
        self._entries_per_segment = entries_per_segment
        directory.mkdir(exist_ok=True)
        for path in [p for p in directory.iterdir() if is_leftover(p)]:
            path.unlink()
        self._pieces = live_pieces(directory)
        self._remove_dead()
        self._next = max((p.last for p in self._pieces), default=0) + 1

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """Live files in order."""
        return tuple(self._pieces)

    def append(self, rows: Sequence[Row]) -> Piece:
        """Make rows durable as one entry: all or none of them.

        Raises:
            DiskFullError: nothing was written.
        """
        number = self._next
        path = self._directory / f"{number:010d}.entry"
        entry = {"table": self._table.name, "version": self._table.version, "rows": rows}
        write_atomically(path, msgspec.msgpack.encode(entry))
        self._next = number + 1
        piece = Piece(number, number, path)
        self._pieces.append(piece)
        return piece

    def compact(self, *, everything: bool = False) -> Piece | None:
        """Turn waiting entries into a segment when there are enough, or any with `everything`."""
        waiting = [p for p in self._pieces if p.is_entry]
        if not waiting or (len(waiting) < self._entries_per_segment and not everything):
            return None
        # Entries are always the newest pieces: every segment swallows all that were waiting.
        rows = [row for piece in waiting for row in read_piece(piece, self._table)]
        return self._replace(waiting[0].first, waiting[-1].last, rows)

    def rewrite(self, keep: Callable[[Row], bool], pieces: Collection[Piece] | None = None) -> None:
        """Drop rows; each file changes atomically, so a repetition completes what a crash cut off.

        Args:
            keep: whether a row stays.
            pieces: files that may hold rows to drop; all, if not given.
        """
        for piece in tuple(self._pieces if pieces is None else pieces):
            rows = read_piece(piece, self._table)
            kept = [row for row in rows if keep(row)]
            if len(kept) < len(rows):
                self._replace(piece.first, piece.last, kept)

    def rows(self) -> Iterator[Row]:
        """All rows in the order of writing."""
        for piece in self._pieces:
            yield from read_piece(piece, self._table)

    def _replace(self, first: int, last: int, rows: Sequence[Row]) -> Piece:
        piece = Piece(first, last, self._directory / f"{first:010d}-{last:010d}.parquet")
        write_atomically(piece.path, to_parquet(rows, self._table))
        kept = [p for p in self._pieces if p.last < first or p.first > last]
        self._pieces = sorted([*kept, piece])
        self._remove_dead()
        return piece

    def _remove_dead(self) -> None:
        live = {piece.path for piece in self._pieces}
        dead = [p for p in self._directory.iterdir() if _piece(p) and p not in live]
        for path in dead:
            path.unlink()
        if dead:
            sync_directory(self._directory)


def live_pieces(directory: Path) -> list[Piece]:
    """Files that count, in order: those whose range no wider file covers."""
    found = [piece for path in directory.iterdir() if (piece := _piece(path))]
    # The widest first among those that start together, so that it is met before what it covers.
    # Of two files with the same range the segment is the newer.
    found.sort(key=lambda p: (p.first, -p.last, p.is_entry))
    live: list[Piece] = []
    for piece in found:
        if not live or piece.first > live[-1].last:
            live.append(piece)
    return live


def read_rows(directory: Path, table: Table, columns: Sequence[str] | None = None) -> Iterator[Row]:
    """All rows of a directory that another process may be writing, one file in memory at a time."""
    if not directory.is_dir():
        return
    for _ in range(_READ_ATTEMPTS):
        pieces = live_pieces(directory)
        try:
            # First what may vanish: the entries. Segments stay, or are replaced under their name.
            waiting = {p: read_piece(p, table, columns) for p in pieces if p.is_entry}
            break
        except FileNotFoundError:
            continue
    else:
        raise UserError(f"{directory}: changes too fast to be read.", fix="try again.")
    for piece in pieces:
        yield from waiting[piece] if piece.is_entry else read_piece(piece, table, columns)


def read_piece(
    piece: Piece,
    table: Table,
    columns: Sequence[str] | None = None,
    where: tuple[str, str] | None = None,
) -> list[Row]:
    """Rows of one file.

    Args:
        piece: the file.
        table: what it holds.
        columns: names to read; all, if not given.
        where: only rows in which this column has this value.

    Raises:
        UserError: if it is damaged or of another version.
        FileNotFoundError: if it was compacted away.
    """
    if not piece.is_entry:
        arrow = read_parquet(piece.path, table, columns)
        if where is not None:
            import pyarrow.compute as pc

            arrow = arrow.filter(pc.equal(arrow[where[0]], where[1]))
        found: list[Row] = arrow.to_pylist()
        return found
    try:
        entry = msgspec.msgpack.decode(piece.path.read_bytes())
        _check_version(piece.path, table, entry["table"], entry["version"])
        rows = [row for row in entry["rows"] if where is None or row[where[0]] == where[1]]
    except (msgspec.DecodeError, KeyError, TypeError) as error:
        raise _damaged(piece.path, error) from None
    return rows if columns is None else [{c: row[c] for c in columns} for row in rows]


def to_parquet(rows: Sequence[Row], table: Table) -> bytes:
    """Encode rows as a Parquet file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    sink = pa.BufferOutputStream()
    arrow = pa.Table.from_pylist(list(rows), schema=arrow_schema(table))
    pq.write_table(arrow, sink, compression="zstd", store_schema=True)
    return bytes(sink.getvalue())


def read_parquet(path: Path, table: Table, columns: Sequence[str] | None = None) -> "pa.Table":
    """Read a Parquet file that `to_parquet` wrote.

    Raises:
        UserError: if it is damaged or of another version.
        FileNotFoundError: if it is absent.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    data = path.read_bytes()
    try:
        file = pq.ParquetFile(pa.BufferReader(data))
        metadata = file.schema_arrow.metadata or {}
        name = metadata.get(b"burnish.table", b"?").decode()
        version = metadata.get(b"burnish.version", b"0").decode()
        _check_version(path, table, name, int(version))
        # Files are small: threads would cost more than they save.
        return file.read(list(columns) if columns is not None else None, use_threads=False)
    except (pa.ArrowException, OSError) as error:
        raise _damaged(path, error) from None


def _piece(path: Path) -> Piece | None:
    if match := _ENTRY.fullmatch(path.name):
        return Piece(int(match[1]), int(match[1]), path)
    if match := _SEGMENT.fullmatch(path.name):
        return Piece(int(match[1]), int(match[2]), path)
    return None


def _check_version(path: Path, table: Table, name: str, version: int) -> None:
    if (name, version) != (table.name, table.version):
        known = f"{table.name} version {table.version}"
        what = f"{path}: holds {name} version {version}, this program reads {known}."
        raise UserError(what, fix="read it with the version of burnish that wrote it.")


def _damaged(path: Path, error: Exception) -> UserError:
    first_line = (str(error) or type(error).__name__).splitlines()[0]
    return UserError(
        f"{path}: damaged ({first_line}).",
        fix="restore this file from a copy, or start a new run; it was written whole once.",
    )
