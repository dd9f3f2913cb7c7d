"""One member of an archive, and what an archive may hold at most."""

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import NamedTuple

MAX_ID = 65535
"""Boxes have the user and group ids 0 to 65,535."""
NOBODY = 65534
"""Stands for the ids that a box does not have."""
MAX_NAME_BYTES = 255
MAX_PATH_BYTES = 4094
"""Archives hold no longer paths: with a `/` before it, no program could name such a file at once,
and an archive of n nested directories grows with the square of n."""
MAX_TARGET_BYTES = 4095
MAX_XATTR_BYTES = 64 * 2**10


class EntryKind(StrEnum):
    """What a member is."""

    FILE = "file"
    """A regular file."""
    FOLDER = "folder"
    """A directory."""
    SYMLINK = "symlink"
    """A symbolic link; its target is kept as it is and never followed on the host."""
    HARDLINK = "hardlink"
    """Another name of an earlier member."""
    SPECIAL = "special"
    """A device, pipe or socket."""


class Extent(NamedTuple):
    """A part of a sparse file that has data."""

    offset: int
    """First byte."""
    length: int
    """Bytes."""


class Entry(NamedTuple):
    """A member of an archive without its content."""

    path: bytes
    """Relative, `/` between components, none of them empty, `.` or `..`; empty: the top itself."""
    kind: EntryKind
    """What it is."""
    mode: int
    """Permission bits, set-id bits removed."""
    uid: int = 0
    """Owner, 0 to `MAX_ID`."""
    gid: int = 0
    """Group, 0 to `MAX_ID`."""
    size: int = 0
    """Bytes of a file, holes included."""
    mtime_ns: int = 0
    """Last change, nanoseconds since 1970."""
    target: bytes = b""
    """Of a symbolic link: what it says. Of a hard link: a path like `path`."""
    xattrs: Mapping[str, bytes] = MappingProxyType({})
    """`user.*` attributes, but for those of overlayfs."""
    extents: tuple[Extent, ...] | None = None
    """Where a sparse file has data; None: everywhere."""

    @property
    def data_bytes(self) -> int:
        """Bytes of content that are stored."""
        return self.size if self.extents is None else sum(part.length for part in self.extents)


class ArchiveLimits(NamedTuple):
    """Bounds that a bomb runs into."""

    num_entries: int = 1_000_000
    """Members."""
    data_bytes: int = 16 * 2**30
    """Content of all files, without holes."""
    file_bytes: int = 2**40
    """One file, holes included."""
    header_bytes: int = 512 * 2**20
    """Long names, attributes and maps of sparse files, all together."""


def check_path(name: bytes) -> bytes:
    """A member's name as a relative path in normal form.

    Raises:
        ValueError: it is absolute, climbs, has a NUL byte, or is too long.
    """
    parts = [part for part in name.split(b"/") if part not in (b"", b".")]
    if name.startswith(b"/"):
        raise ValueError(f"the name {show(name)} is absolute")
    if b".." in parts or b"\0" in name:
        raise ValueError(f"the name {show(name)} leads out")
    if max(map(len, parts), default=0) > MAX_NAME_BYTES or len(name) > MAX_PATH_BYTES:
        raise ValueError(f"the name {show(name)} is too long")
    return b"/".join(parts)


def box_id(number: int) -> int:
    """An owner as a box can have it."""
    return number if 0 <= number <= MAX_ID else NOBODY


def kept_xattr(name: str) -> bool:
    """Whether an extended attribute is content.

    Those of overlayfs would forge what a box sees; a tar cannot hold a name with `=`.
    """
    return name.startswith("user.") and not name.startswith("user.overlay.") and "=" not in name


def show(name: bytes) -> str:
    """A name in a message: escaped, one line, not too long."""
    text = ascii(name[:120])[1:]
    return text if len(name) <= 120 else text + "..."
