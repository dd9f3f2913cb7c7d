"""What gVisor's process says of the program that it runs, as seen from outside."""

import contextlib
import os

from burnish.sandbox.proctree import read_process, read_processes

_MEMORY_FILE = "/memfd:runsc-memory"
_BLOCK_BYTES = 512


def sentry_file_bytes(monitor_pid: int) -> int:
    """Size of the file in memory that holds everything its programs use; 0 before it exists.

    Args:
        monitor_pid: `runsc run`, whose children are the sentry and its file server.
    """
    children = [process.pid for process in read_processes() if process.parent == monitor_pid]
    return max((_memory_file_bytes(pid) for pid in children), default=0)


def _memory_file_bytes(pid: int) -> int:
    folder = f"/proc/{pid}/fd"
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, ProcessLookupError):  # it ended meanwhile
        return 0
    except PermissionError:
        # Nobody may look into a process for a moment at its start and at its end.
        process = read_process(pid)
        return 0 if process is None else process.rss_bytes
    for name in names:
        # A file is closed while we look, and programs make names that are too long to be read.
        with contextlib.suppress(OSError):
            if os.readlink(f"{folder}/{name}").startswith(_MEMORY_FILE):
                return os.stat(f"{folder}/{name}").st_blocks * _BLOCK_BYTES
    return 0
