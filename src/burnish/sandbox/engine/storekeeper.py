"""Runs in a container of its own: holds the files of one box.

    python3 -I -S storekeeper.py SOCKET PLACE UID GID

PLACE is a file system in memory that is this container's volume. It makes three directories there,
hands PLACE and `work` to whoever listens at SOCKET, and changes the size when it is told so. It has
one power, over mounts, and runs nothing. It ends when the other side of the socket does.

Only the standard library, any Python from 3.6 on, one file: it is copied into a container.
"""

import array
import ctypes
import os
import socket
import sys

_MS_NOSUID, _MS_NODEV, _MS_REMOUNT = 0x2, 0x4, 0x20
FOLDERS = ("work", "tmp", "shm")


def storekeeper_source() -> bytes:
    """This file, to be shown to a container."""
    with open(__file__, "rb") as file:
        return file.read()


def resize(place: str, options: str) -> int:
    """The number of the error; 0 if it worked."""
    libc = ctypes.CDLL(None, use_errno=True)
    flags = ctypes.c_ulong(_MS_NOSUID | _MS_NODEV | _MS_REMOUNT)
    result = libc.mount(b"tmpfs", place.encode(), b"tmpfs", flags, options.encode())
    return ctypes.get_errno() if result else 0


def main(path: str, place: str, uid: int, gid: int) -> None:
    """Serve until the other side hangs up."""
    for name in FOLDERS:
        folder = os.path.join(place, name)
        os.mkdir(folder, 0o755)
        os.chown(folder, uid, gid)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(path)
    opened = [os.open(name, os.O_RDONLY | os.O_DIRECTORY) for name in (place, place + "/work")]
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", opened))]
    connection.sendmsg([b"here"], ancillary)
    while True:
        asked = connection.recv(4096)
        if not asked:
            return
        connection.send(b"%d" % resize(place, asked.decode()))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
