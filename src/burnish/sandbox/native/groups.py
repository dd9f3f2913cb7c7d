"""Control groups made ahead and used again: making and removing one costs 0.15 ms."""

import errno
import itertools
import threading
import time

from burnish.core.boxes import Limits
from burnish.sandbox.cgroup import Controllers
from burnish.sandbox.cgroup_files import BoxGroup

_REMOVAL_TRIES, _REMOVAL_PAUSE_S = 200, 0.01
_DEFAULTS = Limits()
# Page tables and the like of a box that has just ended are still charged for a moment.
_USED_UP_BYTES = 4 * 2**20


class Groups:
    """The control groups of a pool's boxes."""

    def __init__(self, controllers: Controllers, *, keep_open: bool) -> None:
        """`keep_open`: see `Controllers.make`."""
        self._controllers = controllers
        self._keep_open = keep_open
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._free: list[BoxGroup] = []
        self._all: set[BoxGroup] = set()
        self._used_up: set[BoxGroup] = set()
        self._closed = False

    def take(self) -> BoxGroup:
        """Groups with default limits and nobody in them.

        Raises:
            OSError: the host is out of something.
        """
        group = self._reusable()
        if group is None:
            group = self._controllers.make(f"box-{next(self._numbers)}", keep_open=self._keep_open)
            self._keep(group)
        try:
            # Files are written into a box before its first command.
            group.set_limits(_DEFAULTS)
        except OSError:
            self.give(group)
            raise
        return group

    def _keep(self, group: BoxGroup) -> None:
        with self._lock:
            if not self._closed:
                self._all.add(group)
                return
        # It was closed while this one was made: nobody would remove it.
        group.close()
        group.delete()
        self._controllers.close()
        raise OSError(errno.ESHUTDOWN, "the pool is closed")

    def _reusable(self) -> BoxGroup | None:
        """A free group to which nothing is charged any more.

        Where a box wrote layers that snapshots keep, the next box would pay for them. Deleting the
        group hands the charge to the group above.
        """
        while True:
            with self._lock:
                if not self._free:
                    return None
                group = self._free.pop()
            if group.held_bytes() <= _USED_UP_BYTES:
                return group
            self._use_up(group)

    def _use_up(self, group: BoxGroup) -> None:
        """Nobody gets it again. Those that a dying process still holds are deleted later."""
        group.close()
        with self._lock:
            self._all.discard(group)
            self._used_up.add(group)
            self._used_up = {old for old in self._used_up if not old.delete()}

    def give(self, group: BoxGroup) -> None:
        """Nobody is in it any more."""
        group.left()
        with self._lock:
            is_ours = group in self._all
            if is_ours and group.reusable:
                self._free.append(group)
                return
        if is_ours:
            self._use_up(group)
        else:
            group.close()

    def close(self) -> None:
        """Remove all. Blocks while a dying process still holds one, two seconds at most."""
        with self._lock:
            self._closed = True
            left, self._all = self._all | self._used_up, set()
            self._used_up = set()
            free, self._free = self._free, []
        # A box that its user still holds may read its counters a last time.
        for group in free:
            group.close()
        for _ in range(_REMOVAL_TRIES):
            left = {group for group in left if not group.delete()}
            if not left:
                break
            time.sleep(_REMOVAL_PAUSE_S)
        self._controllers.close()
