"""What gVisor's process says of the program that it runs, as seen from outside."""

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
        for name in os.listdir(folder):
            path = f"{folder}/{name}"
            if os.readlink(path).startswith(_MEMORY_FILE):
                return os.stat(path).st_blocks * _BLOCK_BYTES
    except (FileNotFoundError, ProcessLookupError):  # it ended meanwhile
        return 0
    except PermissionError:
        # Nobody may look into a process that has given up its memory on its way to the end.
        process = read_process(pid)
        if process is not None and not process.dead and process.rss_bytes:
            raise
    return 0
