"""The keeper's own mount namespace, where every box gets a file system of limited size.

Nothing here is visible on the host, and all of it vanishes with the keeper, however it dies. An
ordinary user gets a user namespace first, in which mounting is allowed.
"""

import ctypes
import os
import select
import signal
import sys
from pathlib import Path
from typing import NamedTuple

from burnish.core.errors import UserError
from burnish.sandbox.host_view import namespace_fix

_CLONE_NEWNS, _CLONE_NEWUSER, _CLONE_NEWPID = 0x00020000, 0x10000000, 0x20000000
_MS_NOSUID, _MS_NODEV, _MS_REMOUNT, _MS_REC, _MS_PRIVATE = 0x2, 0x4, 0x20, 0x4000, 1 << 18
_MS_RDONLY, _MS_NOEXEC, _MS_BIND = 0x1, 0x8, 0x1000
_MNT_DETACH = 2
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36

# Unused on any host we know of: above the subordinate ids that useradd hands out. Each box that is
# alive has its own, so that no box can signal, trace or exhaust the processes of another.
_FIRST_BOX_ID = 1_900_000_000
_NOBODY = 65534

_libc = ctypes.CDLL(None, use_errno=True)


class Identity(NamedTuple):
    """Host-side user of a box; None means the user that we are."""

    uid: int
    gid: int


def enter() -> bool:
    """Leave the host's mount namespace. True if we kept root's power to change user ids.

    Raises:
        UserError: if the host does not allow it.
    """
    uid, gid = os.getuid(), os.getgid()
    privileged = uid == 0
    flags = _CLONE_NEWNS if privileged else _CLONE_NEWNS | _CLONE_NEWUSER
    try:
        _check(_libc.unshare(flags), "unshare")
        if not privileged:
            _write_proc("setgroups", "deny")
            _write_proc("uid_map", f"0 {uid} 1")
            _write_proc("gid_map", f"0 {gid} 1")
        _mount(None, "/", None, _MS_REC | _MS_PRIVATE, None)
    except OSError as error:
        raise UserError(
            f"this machine does not let us create namespaces ({error.strerror}).",
            fix=namespace_fix(),
        ) from error
    _check(_libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), "prctl")
    return privileged


def fork_into_pid_namespace() -> int:
    """Fork like `os.fork`; the child is process 1 of a namespace and dies with us.

    With process 1 the kernel ends every process of the namespace, so nothing that the child ever
    starts can outlive it.

    Raises:
        OSError: namespaces are forbidden, or `/proc` cannot be mounted.
    """
    _check(_libc.unshare(_CLONE_NEWPID), "unshare")
    parent_fd = os.pidfd_open(os.getpid())
    child = os.fork()
    if child == 0:
        _check(_libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl")
        if select.select([parent_fd], [], [], 0)[0]:
            os._exit(1)  # it died before we asked
        _mount("proc", "/proc", "proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC, None)
    os.close(parent_fd)
    return child


def box_identity(privileged: bool, slot: int, uid_map: str | None = None) -> Identity | None:
    """Who a box is on the host. Root hands its boxes to users that own nothing.

    Root of a container may not have all user ids: then it is `nobody`, or else ourselves.
    """
    if not privileged:
        return None
    text = uid_map or Path("/proc/self/uid_map").read_text(encoding="ascii")
    ranges = [[int(field) for field in line.split()] for line in text.splitlines()]
    for wanted in (_FIRST_BOX_ID + slot, _NOBODY):
        if any(first <= wanted < first + count for first, _, count in ranges):
            return Identity(wanted, wanted)
    return None


def make_base() -> Path:
    """Mount the directory that holds all boxes over one that nobody needs in this namespace."""
    needed = [os.path.realpath(path) for path in (*sys.path, sys.prefix, sys.base_prefix) if path]
    for candidate in ("/media", "/srv", "/mnt", "/opt", "/boot"):
        if os.path.isdir(candidate) and not any(
            path == candidate or path.startswith(candidate + "/") for path in needed
        ):
            mount_tmpfs(candidate, size_bytes=2**20, mode=0o711)
            return Path(candidate)
    raise UserError(
        "the sandbox needs one unused directory of /media, /srv, /mnt, /opt, /boot.",
        fix="mkdir /media",
    )


def mount_tmpfs(path: str, *, size_bytes: int, mode: int, owner: Identity | None = None) -> None:
    """A file system in memory with room for `size_bytes`."""
    data = f"{tmpfs_size(size_bytes)},mode={mode:o}"
    if owner is not None:
        data += f",uid={owner.uid},gid={owner.gid}"
    _mount("tmpfs", path, "tmpfs", _MS_NOSUID | _MS_NODEV, data)


def tmpfs_size(size_bytes: int, num_inodes: int | None = None) -> str:
    """Its options of mount.

    Args:
        size_bytes: of all files.
        num_inodes: files and directories; by default in proportion to the size.
    """
    # Inodes cost kernel memory too: one per page of space is more than any honest program needs.
    return f"size={size_bytes},nr_inodes={num_inodes or max(256, size_bytes // 4096)}"


def resize_tmpfs(path: str, size_bytes: int, num_inodes: int | None = None) -> None:
    """Change the room.

    Args:
        path: where it is mounted.
        size_bytes: of all files.
        num_inodes: files and directories; by default in proportion to the size.

    Raises:
        OSError: EINVAL if more than that is in use.
    """
    flags = _MS_NOSUID | _MS_NODEV | _MS_REMOUNT
    _mount("tmpfs", path, "tmpfs", flags, tmpfs_size(size_bytes, num_inodes))


def bind(source: str, target: str) -> None:
    """Show a directory, with what is mounted below it, at a second place.

    Raises:
        OSError: one of them is not there.
    """
    _mount(source, target, None, _MS_BIND | _MS_REC, None)


def mount_cgroup2(path: str) -> None:
    """The control groups of version 2.

    Raises:
        OSError: the kernel has none, or we may not.
    """
    _mount("cgroup2", path, "cgroup2", _MS_NOSUID | _MS_NODEV, None)


def mount_overlay(path: str, layers: tuple[str, ...]) -> None:
    """Show several directories as one that nobody can write, the first on top.

    Raises:
        OSError: the kernel refuses.
    """
    assert not any(character in layer for layer in layers for character in ":,\\")
    _mount("overlay", path, "overlay", _MS_RDONLY, "lowerdir=" + ":".join(layers))


def mount_plain_tmpfs(path: str, *, size_bytes: int) -> None:
    """Without the flags that a user namespace below ours could not take off again.

    gVisor remounts a root file system there, and asks for fewer flags than it finds.
    """
    _mount("tmpfs", path, "tmpfs", 0, f"size={size_bytes},mode=755")


def unmount(path: str) -> None:
    """Detach at once; freed when the last user is gone."""
    _check(_libc.umount2(path.encode(), _MNT_DETACH), f"umount {path}")


def _mount(source: str | None, target: str, kind: str | None, flags: int, data: str | None) -> None:
    arguments = [None if text is None else text.encode() for text in (source, target, kind, data)]
    result = _libc.mount(
        arguments[0], arguments[1], arguments[2], ctypes.c_ulong(flags), arguments[3]
    )
    _check(result, f"mount {target}")


def _write_proc(name: str, text: str) -> None:
    Path("/proc/self", name).write_text(text, encoding="ascii")


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
