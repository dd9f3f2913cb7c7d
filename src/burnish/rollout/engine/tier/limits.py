"""Sizes of the tiers and what happened in them."""

from typing import NamedTuple


class TierLimits(NamedTuple):
    """Where keys and values go that do not fit into memory."""

    ram_bytes: int
    """Keys and values in memory, all layers together."""
    disk_bytes: int
    """Keys and values on disk."""
    directory: str = ""
    """Where the file goes; empty for the system's temporary directory."""
    prefetch: bool = True
    """Read what the next layer will want while this one computes."""


class TierStats(NamedTuple):
    """A snapshot; counts are of one page in one layer, totals since the start."""

    ram_bytes: int = 0
    """Keys and values in memory now."""
    disk_bytes: int = 0
    """Keys and values on disk now."""
    hits: int = 0
    """Pages wanted that were in memory."""
    misses: int = 0
    """Pages wanted that had to be waited for."""
    spilled: int = 0
    """Pages written to disk."""
    prefetched: int = 0
    """Pages read ahead."""
    prefetch_useful: int = 0
    """Of these, those wanted before they were evicted again."""
    read_bytes: int = 0
    """Keys and values read from disk."""
    written_bytes: int = 0
    """Keys and values written to disk."""

    def after(self, past: "TierStats") -> "TierStats":
        """With the counts of an earlier cache, which has given its memory back."""
        return TierStats(
            self.ram_bytes,
            self.disk_bytes,
            *(here + before for here, before in zip(self[2:], past[2:], strict=True)),
        )
