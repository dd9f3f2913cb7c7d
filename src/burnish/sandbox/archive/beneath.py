"""Descriptors of what lies below a directory: the kernel itself refuses every way out.

`openat2` resolves names without following links, or with links confined to the directory as if it
were the root.
"""

import ctypes
import errno
import os
from enum import IntFlag

from burnish.core.errors import UserError

FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
PARENT = FOLDER & ~os.O_NOFOLLOW
"""For directories on the way to something, which may be links where `follow` says so."""
_OPENAT2 = 437
# Only a path with `..` in a tree that changes meanwhile gives EAGAIN.
_ATTEMPTS = 16


class Resolve(IntFlag):
    """`RESOLVE_*` of the kernel's `linux/openat2.h`."""

    NO_XDEV = 1
    NO_MAGICLINKS = 2
    NO_SYMLINKS = 4
    BENEATH = 8
    IN_ROOT = 16


STRICT = Resolve.BENEATH | Resolve.NO_MAGICLINKS | Resolve.NO_SYMLINKS | Resolve.NO_XDEV
CONFINED = Resolve.IN_ROOT | Resolve.NO_MAGICLINKS | Resolve.NO_XDEV


class _OpenHow(ctypes.Structure):
    _fields_ = (
        ("flags", ctypes.c_uint64),
        ("mode", ctypes.c_uint64),
        ("resolve", ctypes.c_uint64),
    )


def _syscall() -> "ctypes._NamedFuncPointer":
    function = ctypes.CDLL(None, use_errno=True).syscall
    function.restype = ctypes.c_long
    return function


_SYSCALL = _syscall()


def open_beneath(root_fd: int, path: bytes, flags: int = FOLDER, *, follow: bool = False) -> int:
    """Open what `path` names below `root_fd`; the empty path is `root_fd` itself.

    Args:
        root_fd: a directory.
        path: relative, without `..`; the kernel takes 4,095 bytes.
        flags: of `open`; nothing is created.
        follow: follow links on the way, with `root_fd` as their root. Without, a link is an error.

    Raises:
        OSError: as `open` does; ELOOP for a link, EXDEV for a way out or another file system.
        UserError: the kernel is too old to be safe.
    """
    return _openat2(root_fd, path or b".", flags, CONFINED if follow else STRICT)


def identity_of(descriptor: int) -> tuple[int, int]:
    """What no other file has while this one is open."""
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino


def climb(descriptor: int, above: tuple[int, int]) -> int:
    """Open the directory above an open one, from which we came: it must be the same still.

    Raises:
        OSError: ESTALE if the tree has changed.
    """
    parent = os.open("..", FOLDER, dir_fd=descriptor)
    if identity_of(parent) != above:
        os.close(parent)
        raise OSError(errno.ESTALE, "a directory was moved while it was read")
    return parent


def _openat2(root_fd: int, path: bytes, flags: int, resolve: Resolve) -> int:
    how = _OpenHow(flags=flags | os.O_CLOEXEC, resolve=resolve)
    for _ in range(_ATTEMPTS):
        descriptor = int(
            _SYSCALL(
                ctypes.c_long(_OPENAT2),
                ctypes.c_int(root_fd),
                ctypes.c_char_p(path),
                ctypes.byref(how),
                ctypes.c_size_t(ctypes.sizeof(how)),
            )
        )
        if descriptor >= 0:
            return descriptor
        code = ctypes.get_errno()
        if code == errno.ENOSYS:
            raise UserError(
                "this kernel has no openat2, so files of a box cannot be touched safely.",
                fix="use Linux 5.6 or newer.",
            )
        if code not in (errno.EAGAIN, errno.EINTR):
            break
    raise OSError(code, os.strerror(code), os.fsdecode(path[:200]))


def split_parent(path: bytes) -> tuple[bytes, bytes]:
    """The path of the directory that holds `path`, and the last component."""
    parent, _, name = path.rpartition(b"/")
    return parent, name
