"""One digest of what a tree shows: names, kinds, modes, owners, links, contents, attributes.

Times, the order in a directory or an archive, holes in files and which names share one file do not
count. Special files do not either: archives cannot hold them.
"""

import hashlib
import os
import stat
import struct
from collections.abc import Sequence

from burnish.sandbox.archive.entry import NOBODY, box_id
from burnish.sandbox.archive.walk import Node, NodeKind, read_extents, read_xattrs, walk

_HEADER = b"burnish tree 1\n"
_BLOCK = 64 * 2**10
_ZEROS = bytes(_BLOCK)
_LETTERS = {NodeKind.FILE: b"f", NodeKind.FOLDER: b"d", NodeKind.SYMLINK: b"l"}


class TreeDigest:
    """Collects nodes in the order of `walk`."""

    def __init__(self, uid_base: int | None) -> None:
        """Start with an empty tree.

        Args:
            uid_base: owner on this host of what belongs to 0 in the tree; None: one owner has all.
        """
        self._hash = hashlib.sha256(_HEADER)
        self._uid_base = uid_base
        self._contents: dict[tuple[int, int], bytes] = {}

    def add(self, node: Node) -> None:
        """Take in one node."""
        if node.kind is NodeKind.SPECIAL:
            return
        fields = [node.path]
        if node.kind is NodeKind.WHITEOUT:
            fields.append(b"w")
        else:
            fields.append(_LETTERS[node.kind] + (b"o" if node.opaque else b""))
            link = node.kind is NodeKind.SYMLINK
            mode = 0o777 if link else kept_mode(node.status.st_mode)
            owner = tuple(
                relative_id(number, self._uid_base)
                for number in (node.status.st_uid, node.status.st_gid)
            )
            fields.append(struct.pack("<III", mode, *owner))
            fields += [node.target()] if link else self._inside(node)
        self._hash.update(struct.pack("<I", len(fields)))
        for field in fields:
            self._hash.update(struct.pack("<Q", len(field)) + field)

    def hexdigest(self) -> str:
        """`sha256:` and 64 digits."""
        return f"sha256:{self._hash.hexdigest()}"

    def _inside(self, node: Node) -> list[bytes]:
        descriptor = node.open()
        try:
            fields = [content for pair in _encoded_xattrs(descriptor) for content in pair]
            if node.kind is NodeKind.FOLDER:
                return fields
            size = os.fstat(descriptor).st_size
            return [struct.pack("<Q", size), self._content(node, descriptor, size), *fields]
        finally:
            os.close(descriptor)

    def _content(self, node: Node, descriptor: int, size: int) -> bytes:
        # A file with thousands of names is read once.
        identity = node.identity
        if identity is not None and identity in self._contents:
            return self._contents[identity]
        content = content_digest(descriptor, size)
        if identity is not None:
            self._contents[identity] = content
        return content


def tree_digest(layer_fds: Sequence[int], uid_base: int | None, *, overlay: bool) -> str:
    """The digest of a tree, or of overlay layers (lowest first) merged."""
    digest = TreeDigest(uid_base)
    for node in walk(layer_fds, overlay=overlay):
        digest.add(node)
    return digest.hexdigest()


def content_digest(descriptor: int, size: int) -> bytes:
    """SHA-256 over the blocks that are not all zeros: a hole of a terabyte costs nothing."""
    result = hashlib.sha256()
    done = 0
    for offset, length in read_extents(descriptor, size):
        for index in range(max(offset // _BLOCK, done), -(-(offset + length) // _BLOCK)):
            block = os.pread(descriptor, min(_BLOCK, size - index * _BLOCK), index * _BLOCK)
            if block != _ZEROS[: len(block)]:
                result.update(struct.pack("<QI", index, len(block)) + block)
            done = index + 1
    return result.digest()


def kept_mode(mode: int) -> int:
    """Permission bits without set-id bits, as archives get them."""
    return stat.S_IMODE(mode) & 0o1777


def relative_id(number: int, uid_base: int | None) -> int:
    """An owner on this host as the tree's own."""
    if uid_base is None:
        return 0
    return box_id(number - uid_base) if number >= uid_base else NOBODY


def _encoded_xattrs(descriptor: int) -> list[tuple[bytes, bytes]]:
    return [(os.fsencode(name), value) for name, value in read_xattrs(descriptor).items()]
