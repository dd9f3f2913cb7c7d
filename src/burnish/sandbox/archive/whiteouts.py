"""Members of an OCI layer that hide files of the layers below it."""

from typing import NamedTuple

from burnish.sandbox.archive.beneath import split_parent
from burnish.sandbox.archive.entry import Entry, EntryKind, show

PREFIX = b".wh."
OPAQUE_NAME = b".wh..wh..opq"


class Hidden(NamedTuple):
    """What a member hides."""

    path: bytes
    """A name, or a directory if `opaque`."""
    opaque: bool
    """Whether all in the directory is hidden rather than the name itself."""


def is_marked(path: bytes) -> bool:
    """Whether a component would be read as a mark in an archive of layers."""
    return path.startswith(PREFIX) or b"/" + PREFIX in path


def read_mark(entry: Entry) -> Hidden | None:
    """What a member hides; None if it is an ordinary one.

    Raises:
        ValueError: the mark names no single file, is not a file, or marks stand on its way.
    """
    if not is_marked(entry.path):
        return None
    parent, name = split_parent(entry.path)
    hidden = name.removeprefix(PREFIX)
    if is_marked(parent) or entry.kind is not EntryKind.FILE:
        raise ValueError(f"{show(entry.path)} is not a valid whiteout")
    if name == OPAQUE_NAME:
        return Hidden(parent, opaque=True)
    if hidden in (b"", b".", b"..") or hidden.startswith(PREFIX):
        raise ValueError(f"{show(entry.path)} is not a valid whiteout")
    return Hidden(parent + b"/" + hidden if parent else hidden, opaque=False)
