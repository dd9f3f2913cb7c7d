"""Control groups made ahead and used again: making and removing one costs 0.15 ms."""

import itertools
import resource
import threading
import time

from burnish.core.boxes import Limits
from burnish.core.errors import UserError
from burnish.sandbox.cgroup import Controllers
from burnish.sandbox.cgroup_files import BoxGroup

_REMOVAL_TRIES, _REMOVAL_PAUSE_S = 200, 0.01
# Of a live box: control socket, pidfd and directory here, the file with its highest use of memory,
# the ends of two pipes for reading while a command runs, and the mount of its disk, if it has one.
_FDS_PER_BOX = 7
_FDS_PER_GROUP = 9
_FDS_ELSEWHERE = 512
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

    def take(self) -> BoxGroup:
        """Groups with default limits and nobody in them.

        Raises:
            OSError: the host is out of something.
        """
        group = self._reusable()
        if group is None:
            group = self._controllers.make(f"box-{next(self._numbers)}", keep_open=self._keep_open)
            with self._lock:
                self._all.add(group)
        try:
            # Files are written into a box before its first command.
            group.set_limits(_DEFAULTS)
        except OSError:
            self.give(group)
            raise
        return group

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


def reserve_files(max_boxes: int) -> bool:
    """Raise our own limit of open files to what so many boxes need.

    Returns:
        Whether there is room to keep the files of control groups open too.

    Raises:
        UserError: the hard limit is too low.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = max_boxes * _FDS_PER_BOX + _FDS_ELSEWHERE
    wanted = needed + max_boxes * _FDS_PER_GROUP
    unlimited = hard == resource.RLIM_INFINITY
    if not unlimited and hard < needed:
        most = (hard - _FDS_ELSEWHERE) // _FDS_PER_BOX
        raise UserError(
            f"{max_boxes} boxes need {needed} open files and this process may have {hard}.",
            fix=f"ulimit -n {needed} as root, or fewer boxes: max_boxes + warm_boxes = {most}",
        )
    most = wanted if unlimited else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return unlimited or hard >= wanted
