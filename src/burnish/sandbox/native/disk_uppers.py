"""What boxes write, on a disk: an ext4 in a file without a name, behind a loop device.

    template of this size --copy--> O_TMPFILE file --LOOP_CONFIGURE--> device --fsmount--> mount

The descriptor of the mount is all that is left in the end. When the owner, the helper and the box
have none any more, however they ended, the kernel unmounts it, the device clears itself and the
file, which has no name, is gone. All blocks of the file are set aside when it is made: a disk of
the host that is full refuses the next box and takes nothing away from this one.
"""

import contextlib
import errno
import fcntl
import os
import struct
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

from burnish.sandbox.native.ext4_templates import Template, make_template
from burnish.sandbox.native.filesystems import (
    NO_DEVICES,
    NO_SETUID,
    flush,
    new_filesystem,
    reconfigure,
)
from burnish.sandbox.native.loop_devices import LoopDevices

_NUM_MAKERS, _NUM_CLOSERS = 4, 2
_NUM_TEMPLATES = 32
# A crash of the host takes the file away: nobody needs its order of writes. Inode tables are zero.
_FLAGS = ("nobarrier", "noinit_itable")
_TRIM, _TRIM_ALL = 0xC0185879, struct.pack("<3Q", 0, 2**64 - 1, 0)
_SHUTDOWN, _WITHOUT_WRITING = 0x8004587D, struct.pack("<I", 2)
# The last process of a box lets go of its mounts a moment after its end was seen.
_RELEASE_TRIES, _RELEASE_PAUSE_S = 20, 0.05


class DiskUppers:
    """Makes and frees the writable file systems of boxes. Usable from any thread."""

    def __init__(self, directory: Path, mkfs: str) -> None:
        """For files of a directory; see `disk_storage`, which says what a failure means.

        Raises:
            OSError: there are no loop devices for us.
        """
        self._directory = directory
        self._mkfs = mkfs
        self._devices = LoopDevices()
        self._lock = threading.Lock()
        self._templates: OrderedDict[tuple[int, int], Template] = OrderedDict()
        self._makers = ThreadPoolExecutor(_NUM_MAKERS, "burnish-disks")
        self._closers = ThreadPoolExecutor(_NUM_CLOSERS, "burnish-disks-end")
        self._closing: set[Future[None]] = set()

    @property
    def directory(self) -> Path:
        """Where the files are."""
        return self._directory

    def submit(self, work: Callable[[], None]) -> None:
        """Do something that makes disks, elsewhere.

        Raises:
            RuntimeError: closed.
        """
        self._makers.submit(work)

    def make(self, disk_bytes: int, num_inodes: int, owner: tuple[int, int]) -> int:
        """A detached mount whose top directory belongs to `owner`. Blocks for 10 ms.

        Raises:
            OSError: ENOSPC if the disk of the host cannot hold so much; or another step.
        """
        try:
            template = self._template(disk_bytes, num_inodes)
            for attempt in range(_RELEASE_TRIES):
                try:
                    mount = self._filled(template)
                    break
                except OSError as error:
                    if error.errno != errno.ENOSPC or not self._wait_for_release(attempt):
                        raise
            else:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            free = os.statvfs(self._directory)
            raise OSError(
                errno.ENOSPC,
                f"{self._directory} has {free.f_bavail * free.f_frsize} bytes left and a box may "
                f"store {disk_bytes}",
            ) from error
        try:
            os.chown(".", *owner, dir_fd=mount)
        except OSError:
            os.close(mount)
            raise
        return mount

    def _wait_for_release(self, attempt: int) -> bool:
        """Whether something is being freed, or was a moment ago; then after some time."""
        with self._lock:
            closing = list(self._closing)
        for future in closing:
            future.exception()
        if attempt > 0 and not closing and attempt >= _RELEASE_TRIES // 4:
            return False
        time.sleep(_RELEASE_PAUSE_S)
        return True

    def _template(self, disk_bytes: int, num_inodes: int) -> Template:
        key = (disk_bytes, num_inodes)
        with self._lock:
            if key in self._templates:
                self._templates.move_to_end(key)
                return self._templates[key]
        file = self._new_file()
        try:
            template = make_template(self._mkfs, file, self._mounted, disk_bytes, num_inodes)
        finally:
            os.close(file)
        with self._lock:
            self._templates[key] = template
            while len(self._templates) > _NUM_TEMPLATES:
                self._templates.popitem(last=False)
        return template

    def _new_file(self) -> int:
        return os.open(self._directory, os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600)

    def _filled(self, template: Template) -> int:
        file = self._new_file()
        try:
            template.write(file)
            return self._mounted(file)
        finally:
            os.close(file)

    def _mounted(self, file: int) -> int:
        device, path = self._devices.attach(file)
        try:
            attributes = NO_SETUID | NO_DEVICES
            options = {"source": path, "errors": "remount-ro"}
            return new_filesystem("ext4", attributes, *_FLAGS, **options)
        finally:
            os.close(device)

    def drop(self, mount: int, *, unwanted: bool) -> None:
        """Let go of a mount, elsewhere: where we are the last, that takes the kernel 25 ms.

        Args:
            mount: from `make`.
            unwanted: nobody will read what was not written out yet.
        """
        work = partial(_let_go, mount, unwanted=unwanted)
        try:
            future = self._closers.submit(work)
        except RuntimeError:
            work()
            return
        with self._lock:
            self._closing.add(future)
        future.add_done_callback(self._closed)

    def _closed(self, future: Future[None]) -> None:
        with self._lock:
            self._closing.discard(future)

    def close(self) -> None:
        """Wait for what is being made or freed. Disks that are in use stay."""
        self._makers.shutdown()
        self._closers.shutdown()
        self._devices.close()


def _let_go(mount: int, *, unwanted: bool) -> None:
    if unwanted:
        with contextlib.suppress(OSError):
            top = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=mount)
            try:
                fcntl.ioctl(top, _SHUTDOWN, _WITHOUT_WRITING)
            finally:
                os.close(top)
    os.close(mount)


def give_back_unused(folder: int) -> None:
    """Return the blocks that a finished layer does not use to the disk of the host."""
    with contextlib.suppress(OSError):
        fcntl.ioctl(folder, _TRIM, bytearray(_TRIM_ALL))


def write_through(mount: int, *, on: bool) -> None:
    """Let each write reach the disk before it returns, in the name of who writes.

    Raises:
        OSError: the file system has failed.
    """
    reconfigure(mount, "sync" if on else "async")


def check_written(folder: int) -> None:
    """Write out all of a disk.

    Raises:
        OSError: something was lost since the folder was opened.
    """
    flush(folder)


def is_broken(folder: int) -> bool:
    """Whether the kernel found the file system of an open folder broken. Takes 0.02 ms."""
    device = os.fstat(folder).st_dev
    name = os.path.basename(
        os.path.realpath(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}")
    )
    try:
        text = Path(f"/sys/fs/ext4/{name}/errors_count").read_text(encoding="ascii")
    except OSError:
        return False
    return int(text) > 0
