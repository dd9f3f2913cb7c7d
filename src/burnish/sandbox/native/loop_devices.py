"""Block devices over files, which vanish when nobody has them open or mounted any more."""

import contextlib
import errno
import fcntl
import os
import stat
import struct
import threading
from pathlib import Path

from burnish.sandbox.native.filesystems import new_filesystem

_CONTROL = "/dev/loop-control"
_GET_FREE, _CONFIGURE = 0x4C82, 0x4C0A
_AUTOCLEAR, _DIRECT_IO = 4, 16
_BLOCK_BYTES = 4096
_MAJOR = 7
# Somebody else may take the free device that we were told of.
_TRIES = 64
# struct loop_config: descriptor, block size, and a struct loop_info64 whose flags are the ninth
# field and whose name follows; the rest stays 0.
_CONFIG = struct.Struct("<II 5Q 4I 64s 64s 32s 2Q 8Q")


class LoopDevices:
    """Makes devices. Has device nodes of its own: those in `/dev` may be missing in a container."""

    def __init__(self) -> None:
        """Open the kernel's control.

        Raises:
            OSError: there is none, or we may not.
        """
        self._lock = threading.Lock()
        self._control = os.open(_CONTROL, os.O_RDWR | os.O_CLOEXEC)
        try:
            self._nodes = new_filesystem("tmpfs", 0, size="64k", mode="0700")
        except OSError:
            os.close(self._control)
            raise

    def attach(self, file: int) -> tuple[int, str]:
        """A device over an open file: its descriptor, and a path to mount it by.

        It is gone when the descriptor is closed and nothing of it is mounted.

        Raises:
            OSError: we may not, or there is none left.
        """
        with self._lock:
            for _ in range(_TRIES):
                name = self._node(fcntl.ioctl(self._control, _GET_FREE))
                device = os.open(name, os.O_RDWR | os.O_CLOEXEC, dir_fd=self._nodes)
                try:
                    _configure(device, file)
                except OSError as error:
                    os.close(device)
                    if error.errno != errno.EBUSY:
                        raise
                    continue
                return device, f"/proc/self/fd/{self._nodes}/{name}"
        raise OSError(errno.EBUSY, "no loop device is free")

    def _node(self, number: int) -> str:
        name = f"loop{number}"
        if not os.access(name, os.F_OK, dir_fd=self._nodes):
            device = os.makedev(_MAJOR, number)
            with contextlib.suppress(OSError):
                text = Path(f"/sys/block/{name}/dev").read_text(encoding="ascii")
                device = os.makedev(*map(int, text.split(":")))
            os.mknod(name, stat.S_IFBLK | 0o600, device, dir_fd=self._nodes)
        return name

    def close(self) -> None:
        """Devices that are in use stay."""
        os.close(self._control)
        os.close(self._nodes)


def _configure(device: int, file: int) -> None:
    """Past the page cache of the host where its file system can: data would be there twice."""
    for flags in (_AUTOCLEAR | _DIRECT_IO, _AUTOCLEAR):
        values = (0,) * 5, (0, 0, 0, flags), (b"", b"", b""), (0,) * 10
        config = _CONFIG.pack(file, _BLOCK_BYTES, *(item for group in values for item in group))
        try:
            fcntl.ioctl(device, _CONFIGURE, config)
        except OSError as error:
            if error.errno != errno.EINVAL or flags == _AUTOCLEAR:
                raise
        else:
            return
