"""New file systems that are mounted nowhere: who has the descriptor has the files."""

import ctypes
import os

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.syscall.restype = ctypes.c_long
# The same on all architectures.
_FSOPEN, _FSCONFIG, _FSMOUNT, _FSPICK = 430, 431, 432, 433
_SET_FLAG, _SET_STRING, _CREATE, _RECONFIGURE = 0, 1, 6, 7
_CLOEXEC, _EMPTY_PATH = 1, 8
NO_SETUID, NO_DEVICES = 2, 4


def new_filesystem(kind: str, attributes: int, *flags: str, **options: str) -> int:
    """Mount one, nowhere. Other threads go on meanwhile.

    Args:
        kind: as in `/proc/filesystems`.
        attributes: of the mount, such as `NO_SETUID`.
        flags: options without a value.
        options: with one.

    Raises:
        OSError: the kernel refuses.
    """
    context = _call(_FSOPEN, kind.encode(), _CLOEXEC)
    try:
        _configure(context, _CREATE, flags, options)
        return _call(_FSMOUNT, context, _CLOEXEC, attributes)
    finally:
        os.close(context)


def reconfigure(mount: int, *flags: str) -> None:
    """Change options of a file system, for all who have it mounted.

    Raises:
        OSError: the kernel refuses.
    """
    context = _call(_FSPICK, mount, b"", _EMPTY_PATH | _CLOEXEC)
    try:
        _configure(context, _RECONFIGURE, flags, {})
    finally:
        os.close(context)


def _configure(context: int, command: int, flags: tuple[str, ...], options: dict[str, str]) -> None:
    for name in flags:
        _call(_FSCONFIG, context, _SET_FLAG, name.encode(), None, 0)
    for name, value in options.items():
        _call(_FSCONFIG, context, _SET_STRING, name.encode(), os.fsencode(value), 0)
    _call(_FSCONFIG, context, command, None, None, 0)


def allocate(descriptor: int, num_bytes: int) -> None:
    """Set blocks of the disk aside for the first bytes of a file; never writes them instead.

    Raises:
        OSError: ENOSPC, or EOPNOTSUPP where the file system cannot.
    """
    arguments = (ctypes.c_int(descriptor), ctypes.c_int(0))
    sizes = (ctypes.c_long(0), ctypes.c_long(num_bytes))
    _check(_LIBC.fallocate(*arguments, *sizes))


def flush(descriptor: int) -> None:
    """Write out the file system of an open file.

    Raises:
        OSError: something could not be written since the file was opened.
    """
    _check(_LIBC.syncfs(ctypes.c_int(descriptor)))


def kind_of(descriptor: int) -> int:
    """The magic number of the file system of an open file."""
    # struct statfs: larger on no architecture, and the kind comes first.
    found = (ctypes.c_long * 64)()
    _check(_LIBC.fstatfs(ctypes.c_int(descriptor), found))
    return int(found[0]) & 0xFFFFFFFF


def _call(number: int, *arguments: int | bytes | None) -> int:
    passed = [ctypes.c_long(item) if isinstance(item, int) else item for item in arguments]
    return _check(_LIBC.syscall(ctypes.c_long(number), *passed))


def _check(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result
