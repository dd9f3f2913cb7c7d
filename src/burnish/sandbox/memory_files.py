"""Files in memory: input for commands, of which neither a reader nor a writer can make one wait."""

import fcntl
import os
from typing import NamedTuple


class Empty(NamedTuple):
    """A file in memory whose reader gets its content later."""

    writable: int
    readable: int


def open_empty() -> Empty:
    """A reader of such a file needs no writer, so that neither can block, unlike with a pipe."""
    writable = os.memfd_create("burnish", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    return Empty(writable, os.open(f"/proc/self/fd/{writable}", os.O_RDONLY | os.O_CLOEXEC))


def seal(writable: int, data: bytes) -> None:
    """Give the file its content; nobody can change it any more."""
    view = memoryview(data)
    while view:
        view = view[os.write(writable, view) :]
    seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
    fcntl.fcntl(writable, fcntl.F_ADD_SEALS, seals)


def sealed(data: bytes) -> int:
    """Such a file with its content, open for reading."""
    file = open_empty()
    seal(file.writable, data)
    os.close(file.writable)
    return file.readable


def anonymous() -> int:
    """An empty file in memory, open for reading and writing."""
    return os.memfd_create("burnish", os.MFD_CLOEXEC)
