"""Large memory in huge pages, where the system has them.

Weights are read once per step at batch 1, and the pages of a sequence lie anywhere: with small
pages every few reads would be a look at an address first.
"""

import contextlib
import math
import mmap
import sys

import torch
from torch import Tensor


def lazy_zeros(*size: int, dtype: torch.dtype = torch.uint8) -> Tensor:
    """Zeros whose memory is taken as it is first touched."""
    count = math.prod(size)
    memory = _private_memory(max(1, count * dtype.itemsize))
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # A kernel without huge pages refuses; then small ones it is.
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype, count=count).view(size)


def _private_memory(num_bytes: int) -> mmap.mmap:
    """Not shared with forked processes.

    Shared memory has huge pages only where an administrator asked for them, and parts of it cannot
    be given back.
    """
    if not hasattr(mmap, "MAP_PRIVATE"):
        return mmap.mmap(-1, num_bytes)
    # Reserved memory counts against the system's limit even if it is never touched.
    no_reserve = 0x4000 if sys.platform.startswith("linux") else 0
    return mmap.mmap(-1, num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve)
