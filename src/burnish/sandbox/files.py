"""Reads and writes in a box's directory from the host's side, where hostile code has been.

Every component is opened beneath the previous one and never through a symbolic link, so nothing
that the box left (links, pipes, devices, directories in the way) can lead out or make us wait.
"""

import contextlib
import errno
import os
import re
import secrets
import stat
from typing import NamedTuple

from burnish.core.errors import FileTooLargeError

# Those that `os.fsdecode` makes of bytes that are not UTF-8 do pass.
UNSPEAKABLE = re.compile("[\ud800-\udc7f\udd00-\udfff]")
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_MAX_DEPTH = 32
_CHUNK_BYTES = 2**20
# The largest file of Linux.
_MOST_BYTES = 2**63


class Owner(NamedTuple):
    """Who owns what we create."""

    uid: int
    gid: int


def split_path(path: str) -> list[str]:
    """Components of a relative path that stays below.

    Raises:
        ValueError: absolute, empty, climbing, too deep, with a NUL byte or what stands for no byte.
    """
    if UNSPEAKABLE.search(path):
        raise ValueError("path has a lone surrogate that stands for no byte")
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if path.startswith("/") or ".." in parts or "\0" in path or not parts:
        raise ValueError(f"path must be relative and stay below /work, got {path[:100]!r}")
    if len(parts) > _MAX_DEPTH:
        raise ValueError(f"path is more than {_MAX_DEPTH} directories deep: {path[:100]!r}")
    return parts


def write_file(root_fd: int, path: str, data: bytes, owner: Owner | None) -> None:
    """Create or replace a file in one step; missing directories are made.

    Raises:
        OSError: no space, or something that is not a directory is in the way.
    """
    *parents, name = split_path(path)
    folder = _open_folder(root_fd, parents, owner, create=True)
    try:
        temporary = f".incoming-{secrets.token_hex(8)}"
        try:
            _write_new(folder, temporary, data, owner)
            os.replace(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
        except OSError:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary, dir_fd=folder)
            raise
    finally:
        os.close(folder)


def read_file(root_fd: int, path: str, limit_bytes: int) -> bytes:
    """All of a regular file.

    Raises:
        FileTooLargeError: it has more than `limit_bytes`.
        FileNotFoundError: absent, not a regular file, or behind a link.
    """
    *parents, name = split_path(path)
    try:
        folder = _open_folder(root_fd, parents, None, create=False)
        try:
            # Without O_NONBLOCK a pipe without a writer would hold us for ever.
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
            descriptor = os.open(name, flags, dir_fd=folder)
        finally:
            os.close(folder)
    except OSError as error:
        raise FileNotFoundError(errno.ENOENT, "no regular file", path) from error
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise FileNotFoundError(errno.ENOENT, "not a regular file", path)
        return read_whole(descriptor, path, limit_bytes)
    finally:
        os.close(descriptor)


def read_whole(descriptor: int, path: str, limit_bytes: int) -> bytes:
    """All of an open file, which is called `path` in what is raised.

    Raises:
        FileTooLargeError: it has more than `limit_bytes`.
    """
    size = os.fstat(descriptor).st_size
    if size > limit_bytes:
        raise FileTooLargeError.too_large(path, size, limit_bytes)
    data = os.pread(descriptor, size + 1, 0)
    # It may have grown meanwhile, and one read gives at most 2 GiB.
    while (part := os.pread(descriptor, _CHUNK_BYTES, len(data))) and len(data) <= limit_bytes:
        data += part
    if len(data) > limit_bytes:
        raise FileTooLargeError.too_large(path, len(data), limit_bytes)
    return data


def check_limit(limit_bytes: int) -> None:
    """Refuse what is no number of bytes.

    Raises:
        ValueError: it is none.
    """
    if not 0 <= limit_bytes < _MOST_BYTES:
        raise ValueError(f"limit_bytes must be 0 to {_MOST_BYTES - 1}, got {limit_bytes}")


def _open_folder(root_fd: int, parts: list[str], owner: Owner | None, *, create: bool) -> int:
    current = os.dup(root_fd)
    for part in parts:
        try:
            if create:
                _make_folder(current, part, owner)
            child = os.open(part, _DIRECTORY, dir_fd=current)
        finally:
            os.close(current)
        current = child
    return current


def _make_folder(parent: int, name: str, owner: Owner | None) -> None:
    try:
        os.mkdir(name, 0o755, dir_fd=parent)
    except FileExistsError:
        return
    if owner is not None:
        os.chown(name, owner.uid, owner.gid, dir_fd=parent, follow_symlinks=False)


def _write_new(folder: int, name: str, data: bytes, owner: Owner | None) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(name, flags, 0o644, dir_fd=folder)
    with open(descriptor, "wb") as file:
        file.write(data)
        if owner is not None:
            os.fchown(descriptor, owner.uid, owner.gid)
