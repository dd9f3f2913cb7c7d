"""Files that are whole or absent, and a full disk told in one line."""

import errno
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from burnish.core.errors import UserError

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
# A kernel or file system that has no such files takes it for opening a directory to write.
_NO_NAMELESS = frozenset({errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL})


class DiskFullError(UserError):
    """No space left. What was written before is whole; the run can be resumed."""

    def __init__(self, path: Path, needed_bytes: int | None = None) -> None:
        """Name the path and what is free there."""
        free = free_bytes(path)
        need = "" if needed_bytes is None else f", {needed_bytes:,} needed"
        super().__init__(
            f"{path}: no space left on this disk ({free:,} bytes free{need}).",
            fix="free some space (or choose another run directory), then go on with --resume.",
        )


def ensure_free_space(path: Path, num_bytes: int) -> None:
    """Refuse to start what cannot finish.

    Raises:
        DiskFullError: if fewer than `num_bytes` are free where `path` is or will be.
    """
    if free_bytes(path) < num_bytes:
        raise DiskFullError(path, num_bytes)


@contextmanager
def full_disk_is_one_line(path: Path) -> Iterator[None]:
    """Translate ENOSPC and EDQUOT into DiskFullError; other errors pass."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise DiskFullError(path) from error
        raise


def replaceable(path: Path) -> Path:
    """Where a file that replaces `path` belongs: behind links, which stay.

    Raises:
        UserError: a device or a pipe is there, which a rename would take away.
        OSError: it cannot be looked at.
    """
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return path
    if stat.S_ISDIR(found.st_mode):
        # A rename refuses it by itself.
        return path
    target = path.resolve()
    # What was opened and then deleted is behind `/dev/stdout`, but at no path.
    if not stat.S_ISREG(found.st_mode) or not _is_same(target, found):
        raise UserError(
            f"{path} is no regular file: it would be replaced, not written to.",
            fix="give a file (and then cat it to where it should go)",
        )
    return target


def require_regular(path: Path, fix: str) -> None:
    """Refuse a pipe or a device, which would be waited for or read without end.

    Raises:
        UserError: the path leads to neither a regular file nor a directory, or nowhere.
    """
    try:
        mode = os.stat(path).st_mode
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}.", fix=fix) from error
    except ValueError as error:
        raise UserError(f"{str(path)!r} is no path: {error}.", fix=fix) from error
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise UserError(f"{path} is no regular file.", fix=fix)


def require_writable(path: Path, flag: str) -> None:
    """Refuse a file that could not be written, before the work for it is done.

    Raises:
        UserError: names the flag, what is in the way, and what to give instead.
    """
    why = ""
    try:
        if path.is_dir():
            why = "it is a directory"
        elif not path.parent.is_dir():
            why = f"there is no directory {path.parent}"
        else:
            replaceable(path)
            # Modes do not tell all: of file systems that take no files at all, for instance.
            trial = _temporary(path)
            os.close(os.open(trial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
            trial.unlink()
    except OSError as error:
        why = error.strerror or str(error)
    except ValueError as error:
        if isinstance(error, UserError):
            raise
        why = str(error)  # a NUL byte
    if why:
        fix = f"{flag} FILE, in a directory of yours that exists"
        raise UserError(f"{flag} {path} cannot be written: {why}.", fix=fix)


def write_atomically(path: Path, data: bytes) -> None:
    """Replace `path` with `data`: after a crash the file is the old or the new one, never a mix.

    Durable on return: the data, the name and the removal of the old file are on the disk.

    Raises:
        DiskFullError: the old file, if any, is untouched.
        UserError: what is there is no regular file.
    """
    replaceable(path)
    temporary = _temporary(path)
    with full_disk_is_one_line(path):
        try:
            with open(temporary, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        sync_directory(path.parent)


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file that takes the place of `path` when the block ends without an error.

    Until then it has no name, so that nothing stays behind however this process ends; but for the
    moment of the rename, and where the file system has no such files (NFS), it has a hidden one.
    Durable afterwards.

    Raises:
        DiskFullError: the old file, if any, is untouched.
        UserError: what is there is no regular file.
        OSError: it cannot be written there.
    """
    path = replaceable(path)
    # Its name is short enough also where a character takes four bytes.
    temporary = path.parent / f".{path.name[:50]}.{secrets.token_hex(8)}.tmp"
    with full_disk_is_one_line(path):
        try:
            with _nameless(path.parent) or open(temporary, "xb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
                if not temporary.exists():
                    _name(file, temporary)
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        sync_directory(path.parent)


def _nameless(directory: Path) -> BinaryIO | None:
    flags = os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC
    try:
        return open(os.open(directory, flags, 0o666), "wb")
    except OSError as error:
        if error.errno in _NO_NAMELESS:
            return None
        raise


def _name(file: BinaryIO, path: Path) -> None:
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        # Without `dst_dir_fd` Python calls link(), which would link the link.
        os.link(f"/proc/self/fd/{file.fileno()}", path.name, dst_dir_fd=directory)
    finally:
        os.close(directory)


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")


def _is_same(path: Path, found: os.stat_result) -> bool:
    try:
        return os.path.samestat(os.lstat(path), found)
    except FileNotFoundError:
        return False


def is_leftover(path: Path) -> bool:
    """Whether a name is that of a temporary file which a killed `write_atomically` left."""
    return path.name.startswith(".") and path.name.endswith(".tmp")


def sync_directory(path: Path) -> None:
    """Make creations, renames and removals in `path` durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def free_bytes(path: Path) -> int:
    """Bytes free where `path` is or will be."""
    existing = next(p for p in (path, *path.absolute().parents) if p.exists())
    return shutil.disk_usage(existing).free
