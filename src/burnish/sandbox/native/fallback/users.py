"""User namespaces: which ids a box has, and who writes its map."""

from __future__ import annotations

import os
from typing import NamedTuple

from . import kernel
from .hello import Hello


class Users(NamedTuple):
    """What the ids 0..num_ids-1 of a box are in our own user namespace."""

    first_uid: int
    first_gid: int
    num_ids: int

    @property
    def init(self) -> int:
        """The init's id in the box: the last one, which no job may have."""
        return self.num_ids - 1

    def maps(self) -> tuple[str, str]:
        """Of a box's user namespace: user and group ids."""
        return self._map(self.first_uid), self._map(self.first_gid)

    def write_maps(self, proc_fd: int, pid: int) -> None:
        """Map the ids of a process that was cloned into a new user namespace."""
        for name, text in zip(("uid_map", "gid_map"), self.maps()):
            _write(proc_fd, pid, name, text)

    def _map(self, first: int) -> str:
        """An ordinary user's ids are two ranges in our own map, so they must be two here."""
        rest = f"\n1 {first + 1} {self.num_ids - 1}" if self.num_ids > 1 else ""
        return f"0 {first} 1{rest}"


def enter(hello: Hello) -> Users:
    """Enter a mount namespace of our own; an ordinary user needs a user namespace for it."""
    if os.geteuid() == 0:
        kernel.unshare(kernel.NEW_MOUNTS)
        return Users(hello.uid_first, hello.gid_first, hello.num_ids)
    uid, gid, pid = os.geteuid(), os.getegid(), os.getpid()
    if hello.num_ids == 1:
        kernel.unshare(kernel.NEW_USER | kernel.NEW_MOUNTS)
        proc = os.open("/proc", os.O_PATH | os.O_CLOEXEC)
        _write(proc, pid, "setgroups", "deny")
        _write(proc, pid, "uid_map", f"0 {uid} 1")
        _write(proc, pid, "gid_map", f"0 {gid} 1")
        os.close(proc)
        return Users(0, 0, 1)
    count = hello.num_ids - 1
    mapped = _run_after_unshare(
        ["newuidmap", str(pid), "0", str(uid), "1", "1", str(hello.uid_first), str(count)],
        ["newgidmap", str(pid), "0", str(gid), "1", "1", str(hello.gid_first), str(count)],
    )
    if not mapped:
        raise PermissionError(1, "newuidmap refused the ids")
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)
    return Users(0, 0, hello.num_ids)


def _run_after_unshare(*commands: list[str]) -> bool:
    """Unshare, and run commands that must stay outside; True if all succeed."""
    started, start = os.pipe()
    helper = os.fork()
    if helper == 0:
        os.close(start)
        failed = not os.read(started, 1)
        for command in commands:
            failed = failed or os.spawnvp(os.P_WAIT, command[0], command) != 0
        os._exit(int(failed))
    os.close(started)
    try:
        kernel.unshare(kernel.NEW_USER | kernel.NEW_MOUNTS)
        os.write(start, b"x")
    finally:
        os.close(start)
        _, status = os.waitpid(helper, 0)
    return status == 0


def _write(proc_fd: int, pid: int, name: str, text: str) -> None:
    descriptor = os.open(f"{pid}/{name}", os.O_WRONLY | os.O_CLOEXEC, dir_fd=proc_fd)
    try:
        os.write(descriptor, text.encode("ascii"))
    finally:
        os.close(descriptor)
