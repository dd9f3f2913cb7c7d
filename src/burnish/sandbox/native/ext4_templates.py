"""Empty ext4 file systems of exact sizes: made once for each size, then copied, which takes 0.3 ms.

mkfs.ext4 takes 20 ms, rounds the number of inodes up to what fills blocks, and has no way to say
how much shall be left for files. So an image is made a little too large, and what is too much is
taken away by files that nobody sees.
"""

import math
import os
import shutil
import subprocess
from collections.abc import Callable
from typing import NamedTuple

from burnish.sandbox.native.filesystems import allocate, reconfigure

MKFS = "mkfs.ext4"
_BLOCK_BYTES, _INODE_BYTES = 4096, 256
_GROUP_BYTES = 8 * _BLOCK_BYTES * _BLOCK_BYTES
_TOO_MUCH_BYTES = 2**20
# All that is wanted and nothing else, whatever /etc/mke2fs.conf says. Neither a journal nor a
# backup serves a file system that ends with its box.
_FEATURES = (
    "none,extent,flex_bg,64bit,filetype,ext_attr,dir_index,dir_nlink,extra_isize,huge_file,"
    "large_file,sparse_super,metadata_csum"
)
_OPTIONS = ("-q", "-F", "-b", str(_BLOCK_BYTES), "-I", str(_INODE_BYTES), "-m", "0")
_EXTENDED = "lazy_itable_init=1,assume_storage_prezeroed=1,root_owner=0:0"
# On the tmpfs of other boxes the three directories of a helper and the two of the overlay take no
# bytes, and inodes of their own.
_OWN_BLOCKS, _OWN_INODES = 5, 7
_RESERVED_INODES = 11
_HIDDEN = ".taken"
_ENVIRONMENT = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C"}

Mounter = Callable[[int], int]
"""Mounts the image in an open file; returns the detached mount."""


class Template(NamedTuple):
    """What is not zero in an image."""

    size_bytes: int
    parts: tuple[tuple[int, bytes], ...]
    """Offset and content."""

    def write(self, file: int) -> None:
        """Make an empty file, whose blocks are set aside, an image.

        Raises:
            OSError: ENOSPC, or EOPNOTSUPP where blocks cannot be set aside.
        """
        allocate(file, self.size_bytes)
        for offset, content in self.parts:
            os.pwrite(file, content, offset)


def find_mkfs() -> str | None:
    """Where the program is."""
    found = shutil.which(MKFS)
    return found or shutil.which(MKFS, path=_ENVIRONMENT["PATH"])


def make_template(
    mkfs: str, file: int, mounted: Mounter, disk_bytes: int, num_inodes: int
) -> Template:
    """Make an image in an empty file, which the caller may close afterwards.

    Args:
        mkfs: the program.
        file: open for reading and writing.
        mounted: mounts it.
        disk_bytes: room for files and directories.
        num_inodes: how many.

    Raises:
        OSError: the disk is full, or a step is refused.
    """
    inodes = num_inodes + _OWN_INODES + _RESERVED_INODES
    wanted_bytes = disk_bytes + _OWN_BLOCKS * _BLOCK_BYTES
    tables = inodes * _INODE_BYTES
    size = wanted_bytes + tables + _TOO_MUCH_BYTES
    # Bitmaps and descriptors of groups; what ext4 keeps for itself (2 %, at most 16 MiB).
    size += math.ceil(size / _GROUP_BYTES) * 4 * _BLOCK_BYTES + min(size // 50, 2**24)
    size = math.ceil(size / _BLOCK_BYTES) * _BLOCK_BYTES
    os.ftruncate(file, size)
    path = f"/proc/self/fd/{file}"
    command = (mkfs, *_OPTIONS, "-O", _FEATURES, "-E", _EXTENDED, "-N", str(inodes), path)
    done = subprocess.run(
        command, pass_fds=(file,), env=_ENVIRONMENT, capture_output=True, check=False
    )
    if done.returncode:
        said = " ".join(done.stderr.decode("utf-8", "replace").split())
        raise OSError(0, f"{MKFS} failed: {said[-300:]}")
    mount = mounted(file)
    try:
        _take_away(mount, wanted_bytes, num_inodes + _OWN_INODES)
        # All is in the file when this is done.
        reconfigure(mount, "ro")
    finally:
        os.close(mount)
    return Template(size, tuple(_parts(file, size)))


def _take_away(mount: int, num_bytes: int, num_inodes: int) -> None:
    """Leave so much."""
    os.rmdir("lost+found", dir_fd=mount)
    os.mkdir(_HIDDEN, 0, dir_fd=mount)
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
    taken = os.open(f"{_HIDDEN}/bytes", flags, 0, dir_fd=mount)
    try:
        for number in range(os.fstatvfs(taken).f_favail - num_inodes):
            os.close(os.open(f"{_HIDDEN}/{number}", flags, 0, dir_fd=mount))
        surplus = _room(taken) - num_bytes
        assert surplus >= 0, f"an image is {-surplus} bytes too small"
        if surplus >= _BLOCK_BYTES:
            allocate(taken, surplus // _BLOCK_BYTES * _BLOCK_BYTES)
        # The extents of a large file take blocks too.
        if lacking := max(0, num_bytes - _room(taken)):
            os.ftruncate(taken, max(0, os.fstat(taken).st_size - lacking))
    finally:
        os.close(taken)


def _room(descriptor: int) -> int:
    found = os.fstatvfs(descriptor)
    return found.f_bavail * found.f_frsize


def _parts(file: int, size: int) -> list[tuple[int, bytes]]:
    parts: list[tuple[int, bytes]] = []
    end = 0
    while True:
        try:
            start = os.lseek(file, end, os.SEEK_DATA)
        except OSError:
            # There is no more data.
            return parts
        end = min(size, os.lseek(file, start, os.SEEK_HOLE))
        content = os.pread(file, end - start, start)
        parts += _not_zero(start, content)


def _not_zero(start: int, content: bytes) -> list[tuple[int, bytes]]:
    """File systems allocate in large pieces, most of which is zero."""
    parts: list[tuple[int, bytes]] = []
    empty = bytes(_BLOCK_BYTES)
    for offset in range(0, len(content), _BLOCK_BYTES):
        block = content[offset : offset + _BLOCK_BYTES]
        if block == empty[: len(block)]:
            continue
        if parts and parts[-1][0] + len(parts[-1][1]) == start + offset:
            parts[-1] = (parts[-1][0], parts[-1][1] + block)
        else:
            parts.append((start + offset, block))
    return parts
