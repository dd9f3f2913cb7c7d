"""Process 1 of a box, to be killed and never mistaken, with no descriptor held for it."""

import errno
import os
import signal
from functools import lru_cache

_NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)


@lru_cache(maxsize=1)
def found_again() -> bool:
    """Whether a process has a number of its own for ever: that of the file behind its pidfd.

    So it is since Linux 6.9. Before, all pidfds are one file, as all event counters are.
    """
    counter = os.eventfd(0, os.EFD_CLOEXEC)
    ours = os.pidfd_open(os.getpid())
    try:
        return os.fstat(ours).st_dev != os.fstat(counter).st_dev
    finally:
        os.close(ours)
        os.close(counter)


class BoxProcess:
    """Known by its pid and that number, or by its pidfd where there is none."""

    __slots__ = ("_number", "_pidfd", "pid")

    def __init__(self, pid: int, pidfd: int) -> None:
        """Take over the pidfd of a process whose pid is so here; 0 if it has none."""
        self.pid = pid
        self._pidfd = pidfd
        self._number: tuple[int, int] | None = None
        if pid > 0 and found_again():
            self._number = _number(pidfd)
            self.close()

    def kill(self) -> bool:
        """End it, if it is there. False: there is no descriptor left to do it with."""
        pidfd = self._pidfd
        try:
            if self._number is None:
                if pidfd >= 0:
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                return True
            pidfd = os.pidfd_open(self.pid)
            try:
                # Else the pid is that of another one by now.
                if _number(pidfd) == self._number:
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            finally:
                os.close(pidfd)
        except OSError as error:
            return error.errno not in _NO_DESCRIPTORS
        return True

    def close(self) -> None:
        """Free the descriptor, where there is one. May be called again."""
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1


def _number(pidfd: int) -> tuple[int, int]:
    found = os.fstat(pidfd)
    return found.st_dev, found.st_ino
