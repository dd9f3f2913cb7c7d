"""Files below /work, read and written for the owner: never through a link, never waiting."""

from __future__ import annotations

import errno
import os
import stat

_WORK = "/work"
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_MAX_DEPTH = 64
_CHUNK_BYTES = 2**20


def put(path: str, source: int, mode: int) -> None:
    """Create or replace a file in one step; missing directories are made.

    Raises:
        OSError: bad path, no space, or something that is not a directory is in the way.
    """
    *parents, name = _split(path)
    folder = _open_folder(parents, create=True)
    temporary = f".incoming-{os.urandom(8).hex()}"
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        target = os.open(temporary, flags, 0o600, dir_fd=folder)
        try:
            _copy(source, target, None)
            os.fchmod(target, mode)
            os.replace(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
        except OSError:
            os.unlink(temporary, dir_fd=folder)
            raise
        finally:
            os.close(target)
    finally:
        os.close(folder)


def get(path: str, target: int, limit_bytes: int) -> None:
    """Copy a regular file; of one that has more than `limit_bytes`, make a hole of its size.

    Raises:
        OSError: ENOENT for whatever is not a regular file, or behind a link.
    """
    *parents, name = _split(path)
    try:
        folder = _open_folder(parents, create=False)
        try:
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
            source = os.open(name, flags, dir_fd=folder)
        finally:
            os.close(folder)
    except OSError as error:
        if error.errno == errno.EACCES:
            raise
        raise FileNotFoundError(errno.ENOENT, "no regular file") from error
    try:
        found = os.fstat(source)
        if not stat.S_ISREG(found.st_mode):
            raise FileNotFoundError(errno.ENOENT, "not a regular file")
        if found.st_size > limit_bytes:
            os.ftruncate(target, found.st_size)
        else:
            _copy(source, target, limit_bytes)
    finally:
        os.close(source)


def _split(path: str) -> list[str]:
    parts = path.split("/")
    if any(part in ("", ".", "..") for part in parts) or len(parts) > _MAX_DEPTH:
        raise OSError(errno.EINVAL, "not a path below /work")
    return parts


def _open_folder(parts: list[str], create: bool) -> int:
    current = os.open(_WORK, _FOLDER)
    for part in parts:
        try:
            if create:
                try:
                    os.mkdir(part, 0o755, dir_fd=current)
                except FileExistsError:
                    pass
            child = os.open(part, _FOLDER, dir_fd=current)
        finally:
            os.close(current)
        current = child
    return current


def _copy(source: int, target: int, limit_bytes: int | None) -> int:
    """From the start of `source`, wherever its offset is."""
    done = 0
    while limit_bytes is None or done < limit_bytes:
        left = _CHUNK_BYTES if limit_bytes is None else min(_CHUNK_BYTES, limit_bytes - done)
        part = memoryview(os.pread(source, left, done))
        if not part:
            break
        done += len(part)
        while part:
            part = part[os.write(target, part) :]
    return done
