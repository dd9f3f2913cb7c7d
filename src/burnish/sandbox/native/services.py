"""What all boxes of a pool use."""

from collections.abc import Callable
from typing import NamedTuple

from burnish.core.boxes import Capabilities
from burnish.sandbox.network.base import NetworkProvider


class Services(NamedTuple):
    """What all boxes of a pool use."""

    capabilities: Capabilities
    null_fd: int
    sampled: bool
    """Some limit is not counted by control groups."""
    counts_pids: bool
    """Control groups bound processes."""
    init_counts: bool
    """Process 1 has the job's user id: `RLIMIT_NPROC` counts it."""
    counts_memory: bool
    """Control groups bound memory."""
    network: NetworkProvider | None
    observe_exec: Callable[[float], None]
