"""Whether boxes can write to a disk here: found by making a file system for one."""

import errno
import os
from pathlib import Path

from burnish.core.errors import UserError
from burnish.sandbox.native.box_room import DEFAULT_ROOM
from burnish.sandbox.native.disk_uppers import DiskUppers
from burnish.sandbox.native.ext4_templates import MKFS, find_mkfs
from burnish.sandbox.native.filesystems import kind_of

DEFAULT_DIRECTORY = Path("/var/tmp")
_IN_MEMORY = {0x01021994: "tmpfs", 0x858458F6: "ramfs"}
_TRIAL = (2**20, 256)
_OTHER = 'or set storage = "memory"'


def open_uppers(directory: Path | None) -> DiskUppers:
    """Check the directory and this machine, and start.

    Args:
        directory: where the files go; None: `DEFAULT_DIRECTORY`.

    Raises:
        UserError: it does not work here; says what to do.
    """
    directory = (DEFAULT_DIRECTORY if directory is None else directory).absolute()
    _check_directory(directory)
    if os.geteuid() != 0:
        raise UserError(
            "boxes that write to a disk take root: the kernel lets nobody else mount an ext4.",
            fix=f"start Burnish as root, {_OTHER}",
        )
    mkfs = find_mkfs()
    if mkfs is None:
        raise UserError(
            f"boxes that write to a disk take {MKFS}, which is not there.",
            fix=f"sudo apt-get install e2fsprogs, {_OTHER}",
        )
    try:
        uppers = DiskUppers(directory, mkfs)
    except OSError as error:
        raise _no_devices(error) from error
    try:
        os.close(uppers.make(*_TRIAL, (0, 0)))
        _check_room(directory)
    except OSError as error:
        uppers.close()
        raise _no_disk(directory, error) from error
    except BaseException:
        uppers.close()
        raise
    return uppers


def _check_directory(directory: Path) -> None:
    name = f"storage_directory {directory}"
    fix = f"set storage_directory to a directory on a disk, {_OTHER}"
    try:
        file = os.open(directory, os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
            reason = "its file system has no files without a name (O_TMPFILE)"
        else:
            reason = os.strerror(error.errno or 0)
        raise UserError(f"{name} cannot be used: {reason}.", fix=fix) from error
    try:
        kind = _IN_MEMORY.get(kind_of(file))
    finally:
        os.close(file)
    if kind is not None:
        raise UserError(f"{name} is in memory ({kind}).", fix=fix)


def _check_room(directory: Path) -> None:
    found = os.statvfs(directory)
    free = found.f_bavail * found.f_frsize
    if free < 2 * DEFAULT_ROOM.disk_bytes:
        raise UserError(
            f"storage_directory {directory} has {free / 2**20:.0f} MiB left: too little for boxes.",
            fix="free some space, or set storage_directory to another disk",
        )


def _no_devices(error: OSError) -> UserError:
    if error.errno == errno.ENOENT:
        fix = "sudo modprobe loop"
    else:
        fix = "start Burnish outside of a container, or in one with --privileged"
    return UserError(
        f"boxes that write to a disk take loop devices: {error.strerror}.", fix=f"{fix}, {_OTHER}"
    )


def _no_disk(directory: Path, error: OSError) -> UserError:
    if error.errno in (errno.EPERM, errno.EACCES, errno.ENXIO, errno.ENODEV, errno.EBUSY):
        return _no_devices(error)
    if error.errno == errno.EOPNOTSUPP:
        return UserError(
            f"storage_directory {directory} is on a file system that sets no space aside.",
            fix=f"use one on ext4, xfs or btrfs, {_OTHER}",
        )
    return UserError(
        f"boxes cannot write to the disk of {directory}: {error}.",
        fix=f"set storage_directory to another disk, {_OTHER}",
    )
