"""System calls that Python has no name for, and what they take."""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
from typing import NamedTuple

# PyDLL keeps the interpreter's lock through the call: the child of a clone must not wait for it.
_libc = ctypes.PyDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long

# name: (x86_64, aarch64)
_NUMBERS = {
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "prctl": (157, 167),
    "personality": (135, 92),
    "capset": (126, 91),
    "unshare": (272, 97),
    "seccomp": (317, 277),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "pidfd_open": (434, 434),
    "clone3": (435, 435),
    "close_range": (436, 436),
    "mount_setattr": (442, 442),
}
_COLUMN = 1 if os.uname().machine == "aarch64" else 0

NEW_MOUNTS, NEW_CGROUP, NEW_UTS, NEW_IPC = 0x00020000, 0x02000000, 0x04000000, 0x08000000
NEW_USER, NEW_PID, NEW_NETWORK = 0x10000000, 0x20000000, 0x40000000
_CLONE_PIDFD, _CLONE_INTO_CGROUP = 0x1000, 0x200000000
_SIGCHLD = 17

AT_FDCWD, AT_EMPTY_PATH, AT_RECURSIVE = -100, 0x1000, 0x8000
READ_ONLY, NO_SETUID, NO_DEVICES, NO_EXEC, IDMAPPED = 1, 2, 4, 8, 0x100000
MS_REMOUNT, MS_BIND, MS_MOVE, MS_RECURSIVE = 32, 4096, 8192, 16384
MS_PRIVATE_ALL = MS_RECURSIVE | 0x40000
_OPEN_TREE_CLONE = 1
_MOVE_FROM_FD, _MOVE_TO_FD = 0x4, 0x40
_DETACH = 2

CAP_CHOWN, CAP_DAC_OVERRIDE, CAP_FOWNER, CAP_FSETID, CAP_KILL = 0, 1, 3, 4, 5
CAP_SETGID, CAP_SETUID, CAP_SETPCAP, CAP_SYS_CHROOT, CAP_SETFCAP = 6, 7, 8, 18, 31
CAP_SYS_ADMIN = 21


def call(name: str, *arguments: int | bytes | ctypes.Array[ctypes.c_char] | None) -> int:
    """Make a system call; integers are passed with 64 bits.

    Raises:
        OSError: with the name of the call.
    """
    passed = [ctypes.c_long(item) if isinstance(item, int) else item for item in arguments]
    result: int = _libc.syscall(ctypes.c_long(_NUMBERS[name][_COLUMN]), *passed)
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result


class Child(NamedTuple):
    """What `clone` gives the parent; in the child `pid` is 0."""

    pid: int
    pidfd: int


def clone(flags: int, cgroup_fd: int | None = None) -> Child:
    """Fork into new namespaces, with the hooks that `os.fork` runs.

    C libraries have no wrapper that could run their own fork handlers, so the child must not rely
    on them: it forks again with `os.fork` before it runs code that is not ours.
    """
    pidfd = ctypes.c_int(-1)
    flags |= _CLONE_PIDFD | (_CLONE_INTO_CGROUP if cgroup_fd is not None else 0)
    fields = (flags, ctypes.addressof(pidfd), 0, 0, _SIGCHLD, 0, 0, 0, 0, 0, cgroup_fd or 0)
    arguments = ctypes.create_string_buffer(struct.pack("<11Q", *fields), 88)
    ctypes.pythonapi.PyOS_BeforeFork()
    try:
        pid = call("clone3", arguments, 88)
    except OSError:
        ctypes.pythonapi.PyOS_AfterFork_Parent()
        raise
    if pid == 0:
        ctypes.pythonapi.PyOS_AfterFork_Child()
        return Child(0, -1)
    ctypes.pythonapi.PyOS_AfterFork_Parent()
    return Child(pid, pidfd.value)


def pidfd_open(pid: int) -> int:
    """A descriptor that becomes readable when the process ends."""
    return call("pidfd_open", pid, 0)


# Mounts. A "tree" is the descriptor of a mount that is attached nowhere yet.


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    """`mount(2)`."""
    call(
        "mount",
        os.fsencode(source),
        os.fsencode(target),
        kind.encode(),
        flags,
        os.fsencode(options),
    )


def new_tree(kind: str, flags: int, **options: str | int) -> int:
    """A new file system."""
    context = call("fsopen", kind.encode(), 1)
    try:
        for key, value in options.items():
            call("fsconfig", context, 1, key.encode(), str(value).encode(), 0)
        call("fsconfig", context, 6, None, None, 0)
        return call("fsmount", context, 1, flags)
    finally:
        os.close(context)


def reconfigure(tree: int, **options: str | int) -> None:
    """Change the options of a mounted file system."""
    context = call("fspick", tree, b"", 0x8 | 1)
    try:
        for key, value in options.items():
            call("fsconfig", context, 1, key.encode(), str(value).encode(), 0)
        call("fsconfig", context, 7, None, None, 0)
    finally:
        os.close(context)


def copy_tree(path: str, *, recursive: bool = True, at: int = AT_FDCWD) -> int:
    """A bind mount of `path`, below the directory `at`."""
    flags = _OPEN_TREE_CLONE | os.O_CLOEXEC | (AT_RECURSIVE if recursive else 0)
    return call("open_tree", at, os.fsencode(path), flags)


def set_tree(tree: int, attributes: int, *, clear: int = 0, user_namespace: int = 0) -> None:
    """Set mount attributes of a whole tree."""
    packed = struct.pack("<4Q", attributes, clear, 0, user_namespace)
    buffer = ctypes.create_string_buffer(packed, 32)
    call("mount_setattr", tree, b"", AT_EMPTY_PATH | AT_RECURSIVE, buffer, 32)


def attach(tree: int, path: str) -> None:
    """Mount a tree; a link at the end of `path` is not followed."""
    call("move_mount", tree, b"", AT_FDCWD, os.fsencode(path), _MOVE_FROM_FD)


def attach_at(tree: int, place: int) -> None:
    """Mount a tree on an open file or directory."""
    call("move_mount", tree, b"", place, b"", _MOVE_FROM_FD | _MOVE_TO_FD)


def detach(path: str) -> None:
    """Unmount at once; users keep what they have open."""
    call("umount2", os.fsencode(path), _DETACH)


def enter_root(directory: str) -> None:
    """Make a mounted directory the root, and let go of the old one."""
    os.chdir(directory)
    call("pivot_root", b".", b".")
    detach(".")
    os.chdir("/")


# Privileges


def unshare(flags: int) -> None:
    """Move this process into new namespaces."""
    call("unshare", flags)


def set_capabilities(capabilities: tuple[int, ...]) -> None:
    """Keep exactly these, in the permitted and the effective set."""
    mask = sum(1 << number for number in capabilities)
    low, high = mask & 0xFFFFFFFF, mask >> 32
    data = ctypes.create_string_buffer(struct.pack("<6I", low, low, 0, high, high, 0), 24)
    call("capset", ctypes.create_string_buffer(struct.pack("<Ii", 0x20080522, 0), 8), data)


def bound_capabilities(capabilities: tuple[int, ...]) -> None:
    """Give up all others for good; what this kernel does not know ends the list."""
    prctl, drop, zero = (
        ctypes.c_long(_NUMBERS["prctl"][_COLUMN]),
        ctypes.c_long(24),
        ctypes.c_long(0),
    )
    for number in range(64):
        if number in capabilities:
            continue
        if _libc.syscall(prctl, drop, ctypes.c_long(number), zero, zero, zero) < 0:
            return


def set_secure_bits(*, fixed: bool, root_is_special: bool) -> None:
    """How user ids and capabilities hang together; ambient ones are off for good.

    Args:
        fixed: changes of user leave capabilities alone.
        root_is_special: programs of root of the box get the bounding set; once off, off for good.
    """
    bits = 0xC0 | (0x4 if fixed else 0) | (0 if root_is_special else 0x3)
    call("prctl", 28, bits, 0, 0, 0)


def die_with_parent() -> None:
    """SIGKILL when the parent ends; cleared by changes of user."""
    call("prctl", 1, 9, 0, 0, 0)


def set_dumpable(allowed: bool) -> None:
    """Whether processes of the same user may look into this one."""
    call("prctl", 4, int(allowed), 0, 0, 0)


def no_new_privileges() -> None:
    """Set-user-id bits and file capabilities stop working, for descendants too."""
    call("prctl", 38, 1, 0, 0, 0)


def fix_addresses() -> None:
    """No address randomisation after the next exec."""
    call("personality", 0x0040000)


def load_filter(program: bytes) -> None:
    """Install a seccomp filter, given as an array of `struct sock_filter`."""
    instructions = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("<HxxxxxxQ", len(program) // 8, ctypes.addressof(instructions))
    call("seccomp", 1, 0, ctypes.create_string_buffer(header, 16))


def start_loopback() -> None:
    """Bring the loopback interface of this network namespace up."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as handle:
        fcntl.ioctl(handle, 0x8914, struct.pack("16sH14x", b"lo", 0x1 | 0x40))


def close_from(first: int) -> None:
    """Close all descriptors from `first` on."""
    try:
        call("close_range", first, 0xFFFFFFFF, 0)
    except OSError:
        os.closerange(first, os.sysconf("SC_OPEN_MAX"))


def rename_process(name: bytes) -> None:
    """Overwrite the command line that others see, which names paths of the host."""
    with open("/proc/self/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
    start, end = int(fields[45]), int(fields[46])
    if 0 < start < end:
        ctypes.memset(start, 0, end - start)
        ctypes.memmove(start, name[: end - start - 1], min(len(name), end - start - 1))
    call("prctl", 15, name[:15] + b"\0", 0, 0, 0)
