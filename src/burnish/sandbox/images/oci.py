"""An OCI image as a tree: layers one over the other, each checked against two digests.

Each layer is read twice. First for its whiteouts, which hide what lower layers brought and nothing
of their own layer, wherever they stand in it; then for its files. The second digest, of the plain
layer, is taken from what was really unpacked.
"""

import hashlib
import re
from typing import BinaryIO, NamedTuple, cast

from burnish.sandbox.archive.compression import decompressed
from burnish.sandbox.archive.entry import ArchiveLimits, EntryKind
from burnish.sandbox.archive.tar_reader import TarReader
from burnish.sandbox.archive.tree_writer import TreeWriter
from burnish.sandbox.archive.whiteouts import Hidden, read_mark
from burnish.sandbox.images.layout import Descriptor, Layout, RunSettings
from burnish.sandbox.images.manifest import Settings
from burnish.sandbox.images.running import check_user
from burnish.sandbox.images.unpacking import Unpacked, image_rules

_VARIABLE = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=([^\0]*)", re.DOTALL)


class OciImage(NamedTuple):
    """What came out of a layout."""

    unpacked: Unpacked
    """Counts over all layers."""
    settings: Settings
    """How to run it."""


def unpack_image(layout: Layout, tag: str | None, tree_fd: int, limits: ArchiveLimits) -> OciImage:
    """Unpack an image into an empty directory.

    Raises:
        UserError: no such tag, or not for this machine.
        ValueError: hostile, damaged, or beyond a limit.
    """
    manifest = layout.manifest(tag)
    config = layout.config(manifest)
    total = Unpacked()
    pairs = zip(manifest.layers, config.rootfs.diff_ids, strict=True)
    for index, (layer, diff_id) in enumerate(pairs):
        left = limits._replace(
            num_entries=limits.num_entries - total.num_entries,
            data_bytes=limits.data_bytes - total.data_bytes,
        )
        if index:
            _hide(_read_marks(layout, layer, left), tree_fd)
        total = total.plus(_unpack_layer(layout, layer, diff_id, tree_fd, left))
    return OciImage(total, read_settings(config.config or RunSettings()))


def read_settings(config: RunSettings) -> Settings:
    """Settings as boxes can have them: variables with odd names are left out.

    Raises:
        ValueError: it runs as nobody that there can be.
    """
    check_user(config.user or "")
    matches = [_VARIABLE.fullmatch(line) for line in config.env or []]
    workdir = config.working_dir or ""
    return Settings(
        env={match[1]: match[2] for match in matches if match is not None},
        workdir=workdir if workdir.startswith("/") and "\0" not in workdir else "",
        user=config.user or "",
    )


def _read_marks(layout: Layout, layer: Descriptor, limits: ArchiveLimits) -> list[Hidden]:
    with layout.open_layer(layer) as raw, decompressed(raw) as stream:
        marks = (read_mark(entry) for entry in TarReader(stream, limits))
        return [mark for mark in marks if mark is not None]


def _hide(marks: list[Hidden], tree_fd: int) -> None:
    writer = TreeWriter(tree_fd, image_rules())
    for mark in marks:
        if mark.opaque:
            writer.empty(mark.path)
        else:
            writer.remove(mark.path)


def _unpack_layer(
    layout: Layout, layer: Descriptor, diff_id: str, tree_fd: int, limits: ArchiveLimits
) -> Unpacked:
    writer = TreeWriter(tree_fd, image_rules())
    dropped = 0
    try:
        with layout.open_layer(layer) as raw, decompressed(raw) as stream:
            hashing = _HashingStream(stream)
            reader = TarReader(cast(BinaryIO, hashing), limits)
            for entry in reader:
                if read_mark(entry) is not None:
                    continue
                if entry.kind is EntryKind.SPECIAL:
                    dropped += 1
                elif entry.path:
                    writer.add(entry, reader.chunks())
            if hashing.digest() != diff_id:
                raise ValueError(f"layer {layer.digest} does not unpack to {diff_id[:100]}")
        writer.finish()
    finally:
        writer.close()
    return Unpacked(reader.num_entries, reader.data_bytes, dropped)


class _HashingStream:
    """Takes the digest of all that is read through it."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._hash = hashlib.sha256()

    def read(self, size: int) -> bytes:
        data = self._stream.read(size)
        self._hash.update(data)
        return data

    def digest(self) -> str:
        """Of what was read so far."""
        return f"sha256:{self._hash.hexdigest()}"
