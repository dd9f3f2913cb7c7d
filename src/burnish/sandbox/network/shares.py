"""How many connections each box may have at once. Pure, but for one look at the host.

The proxy lives in the process of the trainer, which must never run out of descriptors because
boxes are greedy: all boxes together get a fixed number of connections, and each an equal share.
"""

import resource

_SHARE_OF_DESCRIPTORS = 0.25
_DESCRIPTORS_PER_CONNECTION = 2


class Shares:
    """Divides connections among boxes; each has at least one, so that none is shut out."""

    def __init__(self, *, num_in_all: int, num_per_box: int) -> None:
        """No box yet."""
        self._num_in_all = num_in_all
        self._num_per_box = num_per_box
        self.num_boxes = 0
        """Boxes that share."""

    @property
    def num_each(self) -> int:
        """What one box may have now; those that have more get none until they have less."""
        return max(1, min(self._num_per_box, self._num_in_all // max(1, self.num_boxes)))


def affordable_connections() -> int:
    """A quarter of the descriptors that this process may open, in connections."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        soft = 2**20
    return max(1, int(soft * _SHARE_OF_DESCRIPTORS) // _DESCRIPTORS_PER_CONNECTION)
