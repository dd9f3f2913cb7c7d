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
import math
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
_RELEASE_S, _PAUSE_S, _PATIENCE_S = 1.0, 0.05, 10.0


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
        self._making: set[Future[None]] = set()
        self._closing: set[Future[None]] = set()
        self._settled_s = -math.inf

    @property
    def directory(self) -> Path:
        """Where the files are."""
        return self._directory

    def submit(self, work: Callable[[], None]) -> None:
        """Do something that makes disks, elsewhere.

        Raises:
            RuntimeError: closed.
        """
        self._track(self._makers.submit(work), self._making)

    @property
    def is_busy(self) -> bool:
        """Whether something is being made or freed now."""
        return bool(self._making or self._closing)

    def make(self, disk_bytes: int, num_inodes: int, owner: tuple[int, int]) -> int:
        """A detached mount whose top directory belongs to `owner`. Blocks for 10 ms.

        Raises:
            OSError: ENOSPC if the disk of the host cannot hold so much; or another step.
        """
        try:
            mount = self._filled(self._template(disk_bytes, num_inodes))
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
        """A copy of an image; waits for space that is about to be free."""
        end_s = time.monotonic() + _PATIENCE_S
        while True:
            file = self._new_file()
            try:
                template.write(file)
                return self._mounted(file)
            except OSError as error:
                if error.errno != errno.ENOSPC or time.monotonic() > end_s:
                    raise
            finally:
                os.close(file)
            if not self._something_is_freed():
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _something_is_freed(self) -> bool:
        """Whether it is worth another try, after a moment."""
        with self._lock:
            closing = list(self._closing)
            is_over = time.monotonic() - self._settled_s > _RELEASE_S
        for future in closing:
            future.exception()
        if is_over and not closing:
            return False
        time.sleep(_PAUSE_S)
        return True

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
        self._free(partial(_let_go, mount, unwanted=unwanted))

    def give_back_unused(self, folder: int) -> None:
        """Return, elsewhere, the blocks that a finished layer does not use to the host.

        Args:
            folder: of the layer; closed afterwards.
        """
        self._free(partial(_trim, folder))

    def _free(self, work: Callable[[], None]) -> None:
        try:
            future = self._closers.submit(work)
        except RuntimeError:
            # We are closed, and it must be done.
            work()
        else:
            self._track(future, self._closing)

    def _track(self, future: Future[None], among: set[Future[None]]) -> None:
        def done(future: Future[None]) -> None:
            with self._lock:
                among.discard(future)
                self._settled_s = time.monotonic()

        with self._lock:
            among.add(future)
        future.add_done_callback(done)

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


def _trim(folder: int) -> None:
    with contextlib.suppress(OSError):
        fcntl.ioctl(folder, _TRIM, bytearray(_TRIM_ALL))
    os.close(folder)


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
